#!/bin/bash
echo "$(id -un) $(id -u)" > me.txt
