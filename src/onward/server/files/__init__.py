"""OpenAI's files and batches over HTTP.

multipart.py  splits the form of an upload as it arrives
upload.py     the form: its fields, and the file that it writes
store.py      files on disk, with owners, limits and expiry
records.py    batches as they are stored, and the body that creates one
check.py      checks the lines of a batch
batches.py    runs batches in the server's engines (onward.batches does the work)
routes.py     the endpoints
"""
