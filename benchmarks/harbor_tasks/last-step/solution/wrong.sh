#!/bin/bash
printf text > draft.txt
