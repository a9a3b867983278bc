#!/bin/bash
mkdir -p out
case "$(cat draft.txt 2> /dev/null)" in
    "") printf "a text" > draft.txt ;;
    *reviewed) printf " released" >> draft.txt; cp draft.txt out/text.txt ;;
    *) printf " reviewed" >> draft.txt; cp draft.txt out/text.txt ;;
esac
