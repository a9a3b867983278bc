#!/bin/bash
python3 /solution/invert.py
