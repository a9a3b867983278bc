#!/bin/bash
echo "$GREETING $(cat "$NAME_FILE") $SUFFIX" > greeting.txt
