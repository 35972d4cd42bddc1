"""Does a model forget a relation without that relation's heads?"""
