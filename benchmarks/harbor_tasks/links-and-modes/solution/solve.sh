#!/bin/bash
ln -sfn releases/2 current
chmod +x releases/2/run
