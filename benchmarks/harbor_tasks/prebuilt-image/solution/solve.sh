#!/bin/bash
cat > fib.py <<END
a, b = 0, 1
for _ in range(10):
    print(a)
    a, b = b, a + b
END
