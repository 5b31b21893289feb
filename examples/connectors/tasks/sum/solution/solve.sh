#!/bin/bash
echo $(($(paste -sd+ /app/numbers.txt))) > /app/sum.txt
