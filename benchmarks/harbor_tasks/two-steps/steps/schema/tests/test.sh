#!/bin/bash
cd /tests && python3 -c 'import os, table; table.score(table.rows()[:1] == [os.environ["WANTED"]])'
