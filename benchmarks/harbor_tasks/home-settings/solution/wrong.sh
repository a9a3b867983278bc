#!/bin/bash
mkdir -p ~/.config
printf "[demo]\nlevel = 3\n" > ~/.config/demo.ini
