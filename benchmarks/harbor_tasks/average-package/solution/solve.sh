#!/bin/bash
cp "$(dirname "$0")/core.py" stats/core.py
