#!/bin/bash
set -o pipefail
rot < /opt/app/secret.txt | diff - plain.txt
if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
