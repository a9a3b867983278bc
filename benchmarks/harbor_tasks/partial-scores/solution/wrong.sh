#!/bin/bash
for n in 1 2 3 4; do echo $((n * n)) >> squares.txt; done
