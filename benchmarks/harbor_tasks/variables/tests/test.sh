#!/bin/bash
[ -z "$SUFFIX" ] && [ "$(cat /app/greeting.txt)" = "$GREETING $EXPECTED_NAME" ]
if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
