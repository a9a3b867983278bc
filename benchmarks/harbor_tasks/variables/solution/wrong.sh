#!/bin/bash
echo "$GREETING $(cat "$NAME_FILE") $EXPECTED_NAME" > greeting.txt
