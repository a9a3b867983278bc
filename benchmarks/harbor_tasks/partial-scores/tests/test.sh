#!/bin/bash
python3 /tests/score.py
