#!/bin/bash
reward=0
if [ "$(cat /app/out/sum.txt)" = "$WANTED" ] && [ -x /app/out/run ] && [ "$(cat /app/out/latest)" = "$WANTED" ] \
    && [ ! -e /app/out/x.tmp ] && [ ! -e /app/out/cache ] && [ ! -e /app/out/before.txt ]; then
    reward=1
fi
echo "{\"reward\": $reward, \"files\": $(ls /app/out | wc -l)}" > /logs/verifier/reward.json
