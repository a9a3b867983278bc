#!/bin/bash
[ "$(id -un)" = root ] && [ "$(cat /home/agent/work/me.txt)" = "agent 1234" ]
if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
