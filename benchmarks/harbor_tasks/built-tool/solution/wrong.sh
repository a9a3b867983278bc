#!/usr/bin/env bash
base64 < secret.txt > plain.txt
