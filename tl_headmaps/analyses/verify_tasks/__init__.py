"""Does a model get worse at a function without that function's heads?"""
