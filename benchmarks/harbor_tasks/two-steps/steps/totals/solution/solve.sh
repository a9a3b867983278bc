#!/bin/bash
sort incoming.txt | uniq -c | awk '{ print $2 "," $1 }' >> items.csv
