#!/bin/bash
sort -u incoming.txt | sed 's/$/,1/' >> items.csv
