#!/bin/bash
reward=0
if [ "$(stat -c %a ~/.ssh/id_key)" = 600 ] && [ "$(wc -c < ~/.ssh/id_key)" -gt 20 ] \
    && [ "$(wc -c < ~/.ssh/id_key.pub)" -gt 20 ] && [ ! -e /srv/old ] && [ -e /srv/keep ]; then
    reward=1
fi
echo $reward > /logs/verifier/reward.txt
