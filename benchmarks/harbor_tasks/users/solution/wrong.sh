#!/bin/bash
echo "root 0" > me.txt
