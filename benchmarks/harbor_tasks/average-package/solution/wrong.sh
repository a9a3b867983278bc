#!/bin/bash
sed -i "s|//|/|" stats/core.py
