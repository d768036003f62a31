"""The page's section on serving: every length policy under load, with a load and a threshold to play with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pipelines.reporting.charts import Series, line_chart, number
from pipelines.reporting.page_parts import absent, folded, key, table

NAMES = {
    "none": "no drafting",
    "one-slot": "one slot",
    "static": "fixed length",
    "full": "whole block",
    "threshold": "threshold",
    "scheduler": "scheduler",
    "two-steps-behind": "two steps behind",
}
# tone, marker, dashed
LOOKS = {
    "none": ("c", "none", True),
    "one-slot": ("e", "none", True),
    "static": ("f", "none", False),
    "full": ("b", "none", False),
    "threshold": ("d", "none", False),
    "scheduler": ("a", "none", False),
    "two-steps-behind": ("a", "none", True),
}


def serving(report: Mapping[str, Any]) -> str:
    found = report.get("serving")
    if not found:
        return absent("No step costs were measured with this evaluation: there is nothing to compare under load.")
    names = found["policies"]
    keys = "".join(key(*LOOKS[name][:2], NAMES[name], LOOKS[name][2]) for name in names)
    measured = sorted({point["users"] for point in found["measured"]})
    told = (
        f"Lines are recorded rounds replayed over the measured cost of a step; hollow points are the engine itself, "
        f"with {_listed(measured)} users on this machine."
        if measured
        else "Recorded rounds, replayed over the measured cost of a step; the engine itself was not put under load."
    )
    return (
        "<p>So many users, each with one request at a time. More users share a step, and every verified draft makes "
        f"the step longer: what pays for one user can cost a crowd. {told} Decoding temperature "
        f"{found['temperature']:g}; passes over prompts are left out.</p>"
        f'<ul class="legend">{keys}</ul><div class="grid2"><div class="panel"><h3>Speed of one user against all '
        f'together</h3>{_trade(found)}</div><div class="panel"><h3>Drafts verified a request</h3>{_budget(found)}</div>'
        f"{_player(found)}</div>{_note(found)}"
        + folded("Every load and policy as a table", _table(found))
        + folded("What a step costs", _costs(found["costs"]))
    )


def serving_data(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the page's script computes with."""
    found = report.get("serving")
    if not found:
        return None
    wanted = ("policies", "users", "threshold", "replayed", "rounds", "costs")
    return {name: found[name] for name in wanted} | {"names": NAMES}


def _listed(numbers: Sequence[int]) -> str:
    words = [str(value) for value in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    return [point for point in rows if point["policy"] == name]


def _trade(found: Mapping[str, Any]) -> str:
    lines = []
    for name in found["policies"]:
        tone, _, dashed = LOOKS[name]
        line = [(p["tokens_per_second_user"], p["tokens_per_second"]) for p in _points(found["replayed"], name)]
        lines.append(Series(name=NAMES[name], points=line, tone=tone, marker="none", dashed=dashed))
        own = [(p["tokens_per_second_user"], p["tokens_per_second"]) for p in _points(found["measured"], name)]
        if own:
            lines.append(_dots(f"{NAMES[name]}, engine", own, tone))
    every = [*found["replayed"], *found["measured"]]
    return line_chart(
        lines,
        title="All users' tokens a second against those of one user",
        x_label="tokens a second, one user",
        y_label="all users together",
        x_range=(0.0, 1.04 * max(p["tokens_per_second_user"] for p in every)),
        y_range=(0.0, 1.06 * max(p["tokens_per_second"] for p in every)),
        height=260,
    )


def _dots(name: str, points: Sequence[tuple[float, float]], tone: str) -> Series:
    """Single points: the line is broken between them."""
    broken: list[tuple[float, float | None]] = []
    for x, y in points:
        broken += [(x, y), (x, None)]
    return Series(name=name, points=broken, tone=tone, hollow=frozenset(x for x, _ in points))


def _budget(found: Mapping[str, Any]) -> str:
    users = found["users"]
    lines = []
    for name in found["policies"]:
        tone, _, dashed = LOOKS[name]
        line = [(users.index(p["users"]), p["drafts"]) for p in _points(found["replayed"], name)]
        lines.append(Series(name=NAMES[name], points=line, tone=tone, marker="none", dashed=dashed))
        own = [(users.index(p["users"]), p["drafts"]) for p in _points(found["measured"], name) if p["users"] in users]
        if own:
            lines.append(_dots(f"{NAMES[name]}, engine", own, tone))
    return line_chart(
        lines,
        title="Verified drafts a request and step, against users",
        x_label="users",
        y_label="drafts a step",
        x_range=(0.0, max(len(users) - 1, 1)),
        y_range=(0.0, found["rounds"]["slots"] + 0.3),
        x_ticks=list(range(len(users))),
        y_ticks=list(range(found["rounds"]["slots"] + 1)),
        x_format=lambda index: str(users[int(index)]),
        height=260,
        cursor=True,
    )


def _player(found: Mapping[str, Any]) -> str:
    users = found["users"]
    start = len(users) // 2
    here = {point["policy"]: point for point in found["replayed"] if point["users"] == users[start]}
    most = max(point["tokens_per_second"] for point in here.values())
    rows = "".join(
        f'<tr data-policy="{name}"><th scope="row">{escape(NAMES[name])}</th>'
        f'<td data-field="tokens_per_second">{number(here[name]["tokens_per_second"], 1)}</td>'
        f'<td class="meter"><i class="tone-{LOOKS[name][0]}" style="width:'
        f'{100 * here[name]["tokens_per_second"] / most:.1f}%"></i></td>'
        f'<td data-field="tokens_per_second_user">{number(here[name]["tokens_per_second_user"], 1)}</td>'
        f'<td data-field="drafts">{number(here[name]["drafts"])}</td>'
        f'<td data-field="accepted_length">{number(here[name]["accepted_length"])}</td></tr>'
        for name in found["policies"]
    )
    head = "".join(
        f'<th scope="col"{extra}>{text}</th>'
        for text, extra in (
            ("policy", ""),
            ("tokens/s", ""),
            ("", ' class="meter" aria-hidden="true"'),
            ("one user", ""),
            ("drafts", ""),
            ("tokens a step", ""),
        )
    )
    level = ""
    if "threshold" in found["policies"]:
        level = (
            '<label class="control">Confidence threshold <output data-out="threshold">'
            f"{found['threshold']:.2f}</output>"
            f'<input type="range" data-control="threshold" min="0" max="1" step="0.01" value="{found["threshold"]:g}">'
            "</label>"
        )
    return (
        '<div class="panel wide" id="load"><h3>Under the load of <output data-out="users">'
        f"{users[start]}</output> users</h3>"
        '<div class="controls only-script"><label class="control">Users <output data-out="users">'
        f'{users[start]}</output><input type="range" data-control="users" min="0" max="{len(users) - 1}" '
        f'value="{start}"></label>{level}</div>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Policies under this load"><table class="load">'
        f'<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div><p class="note" data-out="verdict" '
        f'aria-live="polite">{escape(_verdict(found, users[start]))}</p></div>'
    )


def _verdict(found: Mapping[str, Any], users: int) -> str:
    best = next(row for row in found["best"] if row["users"] == users)
    if best["policy"] == "none":
        return "Here nothing beats not drafting."
    return f"Most tokens a second: {NAMES[best['policy']]}, {best['against_none']:.2f} times as many as without drafts."


def _note(found: Mapping[str, Any]) -> str:
    last = found["costs"]["tokens"][-1]
    loses = [row["users"] for row in found["best"] if row["policy"] == "none"]
    where = f" With {_listed(loses)} users nothing beats not drafting." if loses else ""
    return (
        f'<p class="note">Steps of more than {last} tokens were not measured: their time is by the token.{where} '
        "The threshold's row is worked out in the page, from the recorded rounds, for a step of mean size.</p>"
    )


def _table(found: Mapping[str, Any]) -> str:
    rows = [("engine", point) for point in found["measured"]] + [("replay", point) for point in found["replayed"]]
    order = {name: place for place, name in enumerate(found["policies"])}
    rows.sort(key=lambda row: (row[1]["users"], row[0], order.get(row[1]["policy"], 99)))
    return table(
        "Load points",
        ["policy", "users", "from", "tokens/s", "one user", "drafts", "tokens a step", "step, ms", "steps"],
        [
            [
                NAMES[point["policy"]],
                point["users"],
                source,
                number(point["tokens_per_second"], 1),
                number(point["tokens_per_second_user"], 2),
                number(point["drafts"]),
                number(point["accepted_length"]),
                number(1000 * point["step_seconds"], 1),
                point["steps"],
            ]
            for source, point in rows
        ],
    )


def _costs(costs: Mapping[str, Any]) -> str:
    passes = table(
        f"The target's pass: {costs['source']}",
        ["tokens in the batch", "steps a second", "ms"],
        [
            [tokens, number(speed), number(1000 / speed, 1)]
            for tokens, speed in zip(costs["tokens"], costs["steps_per_second"], strict=True)
        ],
    )
    draft = costs["draft"]
    drafts = ""
    if draft["rows"]:
        drafts = table(
            "A block's draft",
            ["requests", "ms"],
            [[rows, number(1000 * seconds, 1)] for rows, seconds in zip(draft["rows"], draft["seconds"], strict=True)],
        )
    conditions = f"<pre>{escape(json.dumps(costs['conditions'], indent=2))}</pre>" if costs["conditions"] else ""
    return f'<div class="grid2"><div>{passes}</div><div>{drafts}{conditions}</div></div>'


SERVING_SCRIPT = """
(function(){
var box=document.getElementById('load'),node=document.getElementById('serving-data');
if(!box||!node)return;
var data=JSON.parse(node.textContent);
if(!data)return;
var costs=data.costs,rounds=data.rounds;
function interpolate(x,xs,ys){
  var last=xs.length-1,k=1;
  if(x<=xs[0])return ys[0];
  if(x>xs[last])return ys[last]*x/xs[last];
  while(xs[k]<x)k++;
  return ys[k-1]+(ys[k]-ys[k-1])*(x-xs[k-1])/(xs[k]-xs[k-1]);
}
var times=costs.steps_per_second.map(function(speed){return 1/speed;});
function seconds(tokens,users){
  var draft=costs.draft.rows.length?interpolate(users,costs.draft.rows,costs.draft.seconds):0;
  return interpolate(tokens,costs.tokens,times)+draft;
}
function atThreshold(level,users){
  var drafts=0,tokens=0,n=rounds.accepted.length;
  for(var i=0;i<n;i++){
    var row=rounds.confidence[i],length=0;
    while(length<row.length&&row[length]>=1000*level)length++;
    drafts+=length;tokens+=Math.min(rounds.accepted[i],length)+1;
  }
  drafts/=n;tokens/=n;
  var time=seconds(users*(1+drafts),users);
  return{policy:'threshold',users:users,drafts:drafts,accepted_length:tokens,tokens_per_second:users*tokens/time,
    tokens_per_second_user:tokens/time};
}
var load=box.querySelector('[data-control=users]'),level=box.querySelector('[data-control=threshold]');
var cursor=box.parentNode.querySelector('.cursor'),digits={drafts:2,accepted_length:2};
function show(){
  var users=data.users[+load.value],points={},most=0,best=null;
  data.replayed.forEach(function(point){if(point.users===users)points[point.policy]=point;});
  if(level){
    points.threshold=atThreshold(+level.value,users);
    box.querySelector('[data-out=threshold]').textContent=(+level.value).toFixed(2);
  }
  Object.keys(points).forEach(function(name){
    if(points[name].tokens_per_second>most){most=points[name].tokens_per_second;best=name;}
  });
  box.querySelectorAll('[data-policy]').forEach(function(row){
    var point=points[row.dataset.policy];
    row.classList.toggle('best',row.dataset.policy===best);
    row.querySelector('i').style.width=(100*point.tokens_per_second/most).toFixed(1)+'%';
    row.querySelectorAll('[data-field]').forEach(function(cell){
      cell.textContent=point[cell.dataset.field].toFixed(digits[cell.dataset.field]||1);
    });
  });
  box.querySelectorAll('[data-out=users]').forEach(function(out){out.textContent=users;});
  load.setAttribute('aria-valuetext',users+' users');
  box.querySelector('[data-out=verdict]').textContent=best==='none'?'Here nothing beats not drafting.':
    'Most tokens a second: '+data.names[best]+', '+(most/points.none.tokens_per_second).toFixed(2)+
    ' times as many as without drafts.';
  if(cursor){
    var l=+cursor.dataset.left,r=+cursor.dataset.right,x=l+(r-l)*load.value/Math.max(data.users.length-1,1);
    cursor.setAttribute('x1',x);cursor.setAttribute('x2',x);
  }
}
load.addEventListener('input',show);if(level)level.addEventListener('input',show);show();
})();
"""
