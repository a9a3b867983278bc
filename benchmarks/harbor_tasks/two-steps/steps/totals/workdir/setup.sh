#!/bin/bash
test -f items.csv && touch ready
