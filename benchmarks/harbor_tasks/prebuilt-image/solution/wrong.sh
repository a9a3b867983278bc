#!/bin/bash
echo "while True: pass" > fib.py
