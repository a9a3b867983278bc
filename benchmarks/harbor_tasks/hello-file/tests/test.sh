#!/bin/bash

[ "$(cat /app/hello.txt)" = "Hello, world!" ]
if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
