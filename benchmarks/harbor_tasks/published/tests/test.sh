#!/bin/bash
reward=0
if [ "$(cat /logs/artifacts/state.txt)" = done ] && [ "$(cat /logs/artifacts/tries.txt)" = 2 ] \
    && [ ! -e /app/state.txt ]; then
    reward=1
fi
echo $reward > /logs/verifier/reward.txt
