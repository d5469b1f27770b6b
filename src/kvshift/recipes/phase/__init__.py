"""When do models begin to copy on real text, and what is the shift worth before that, at it and afterwards?"""
