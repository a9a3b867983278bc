#!/bin/bash
if [ -e /app/draft.txt ]; then echo 0.1
elif [ "$(cat /app/out/text.txt)" = "a text reviewed released" ]; then echo 1
else echo 0; fi > /logs/verifier/reward.txt
