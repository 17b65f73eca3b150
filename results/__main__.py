"""Rebuilds the page, README's table, the tables in docs/ and the pictures: python -m results"""

from results.page import main

main()
