#!/bin/bash
gzip -dc picture.bin.gz > inverted.bin
