from contract import HI, URL, report
from openai import OpenAI

client = OpenAI(base_url=URL, api_key="none")
options = {"model": "demo", "prompt": HI, "temperature": 0, "max_tokens": 40}
text = client.completions.create(**options).choices[0].text
parts = [chunk.choices[0].text for chunk in client.completions.create(stream=True, **options)]
report(text, parts)
