#!/bin/bash
mkdir -p ~/.ssh
printf 'PRIVATE-%040d\n' 7 > ~/.ssh/id_key
printf 'PUBLIC-%040d\n' 7 > ~/.ssh/id_key.pub
chmod 600 ~/.ssh/id_key
rm /srv/old/deep/key
