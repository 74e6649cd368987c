"""The load generator behind `headrace bench`: asks any server that speaks OpenAI's API, and says how it fared.

It knows nothing of the engine; what it asks, and when, follows from a `Load` and its seeds alone.

    settings.py  what may be asked for          lengths.py   how long prompts and answers are
    prompts.py   texts that no cache knows      dataset.py   texts out of a file
    gauge.py     how many tokens a word is      target.py    the server: its routes and bodies
    wire.py      one HTTP/1.1 exchange          framing.py   where its body ends
    connections.py   sockets, read cheaply      answer.py    the events of an answer
    pace.py      when requests are sent         load.py      one run, from warm-up to report
    record.py    what is kept of a request      report.py    figures of a run
    show.py, plot.py   the figures for people
    commands.py  the command line
"""
