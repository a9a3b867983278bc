#!/bin/bash
cd /tests && python3 -c 'import table; table.score(table.rows()[1:] == ["apple,2", "pear,1"])'
