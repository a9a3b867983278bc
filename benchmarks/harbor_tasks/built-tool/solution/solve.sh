#!/usr/bin/env bash
set -euo pipefail
rot < secret.txt > plain.txt
