"""Masked words of real text: does an encoder, which sees what follows anyway, gain by a shift that looks both ways?"""
