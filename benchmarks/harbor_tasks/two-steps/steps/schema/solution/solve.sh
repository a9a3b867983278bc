#!/bin/bash
echo name,count > items.csv
