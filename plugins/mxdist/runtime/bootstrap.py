"""The first thing of mxdist that runs on a host: it gets the code, and becomes what it was asked to be.

This file is self-contained: it is sent as text. Either a Python that was started with ``COMMAND`` reads it from its
standard input as a first frame, and the document as a second one; or a script holds its text, and the name of a file
with the document. A frame is its length in decimal, a newline, and that many bytes. Nothing secret is part of a command.

The document is one JSON object::

    what          "agent": runs the ranks of this host for a supervisor elsewhere (mxdist.runtime.agent); answers go on
                  "supervisor": makes the scratch folder, starts mxdist.runtime.supervisor there; one answer
                  "life": is the supervisor with "pid" and "start_time" alive, what else of the job is; one answer
                  "end": ends every process of the job here, with "grace_s"; one answer
                  "probe": looks at the host for a preflight (mxdist.runtime.probe); one answer
    code          {"how": "bundle", "uri": "<runs_uri>/_code/<digest>.zip", "digest": "<sha256>"}: unpacked once a node
                  {"how": "shared", "folder": "/path"}: a folder that holds mxdist/, on a disk that this host sees
                  {"how": "image"}: this Python has mxdist installed. With "uri" and "digest" as well, "bundle" counts
                  for the user's code and mxdist alike
    python        the Python of the node environment; null: the one that runs this
    workdir       folder for scratch folders, code and datasets; null: $MXDIST_WORKDIR or ~/.local/state/mxdist/jobs
    runs_uri, job_key, attempt, token        of the attempt; the token is not secret, but belongs to one attempt
    storage       {"endpoint_url": ..., "region": ...}
    environment   {name: value}: allow-listed and not secret, added to what the host itself gives
    secrets       {name: value}: handed on in a 0600 file or a file without a name, never in a command or on a shared disk
    link_timeout_s  how long agent and supervisor may hear nothing of each other

    supervisor:   "incarnation": number; "nonce": any word, stands in the claim that the launcher then looks for;
                  "foreground": true: stay in the foreground until the end (Slurm's batch step, a pod);
                  "hosts": names of the hosts in their order, or null where job or platform say them;
                  "here": the name of the host that this is, null: none of them;
                  "opener": how the other hosts are reached: see mxdist.runtime.openers
    agent:        "host": its name in the plan; "number": which host of the plan
    life:         "pid", "start_time"
    end:          "grace_s"; "spare": true: leave the supervisor itself alone

Answers, and everything else that goes the other way, are lines ``{"mxdist": "<kind>", ...}`` on standard output; other
lines are a login shell's chatter. Kinds of single answers: "answer" with what was asked for, "error" with
{"message", "hint", "retryable"}. The exit code is 0 after an answer, else 1.
"""
