"""OpenAI's files and batches over HTTP.

upload.py   the form of an upload as it arrives: its fields, and the file that it writes
store.py    files on disk, with owners, limits and expiry
records.py  batches as they are stored, the body that creates one, and checks of the lines
batches.py  runs batches in the server's engines (onward.batches does the work)
routes.py   the endpoints
"""
