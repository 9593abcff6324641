"use strict";
// The viewer's page: five views of one or more runs. All text of runs goes in as text, never as HTML, and as `printable` gives it.

const COLORS = ["#2457c5", "#c2410c", "#18794e", "#8a3ffc", "#b45309", "#0e7490", "#be185d", "#57606a"];
const CUT = { budget: "the budget", environment: "the environment", context: "the context", time: "the time limit", error: "an error" };
const VIEWS = ["overview", "curves", "trajectories", "compare", "time"];
const SIDES = ["one", "left", "right"]; // browsers of trajectories: alone, and the two of a comparison
const SECONDS_BETWEEN_READS = 5;
const glossary = JSON.parse(document.getElementById("glossary").textContent);

// Where runs and traces come from: this file, or the server that serves it.

const stored = JSON.parse(document.getElementById("runs").textContent);
const isLive = stored === null;
const cache = new Map();

async function readRuns() {
  const read = isLive ? await (await fetch("runs")).json() : stored;
  return read.map((run) => ({ ...run, name: printable(run.name) })); // for plots, too
}

async function readTrace(run, id) {
  const key = `${run}/${id}`;
  if (!cache.has(key)) {
    const bytes = isLive
      ? new Uint8Array(await (await fetch(`trace/${key}`)).arrayBuffer())
      : Uint8Array.from(atob(document.getElementById(`trace-${run}-${id}`).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const damaged = { groups: [], strings: [], note: `${id} is damaged and cannot be shown; other steps can` };
    cache.set(key, await new Response(stream).json().catch(() => damaged));
  }
  return cache.get(key);
}

// Small helpers for the document.

// Controls but tab and newline become escapes, with marks that reorder what a person reads.
const printable = (text) => text.replace(/(?![\t\n])[\p{Cc}\p{Bidi_Control}]/gu, (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (value !== false && value !== null) element.setAttribute(name, value === true ? "" : value);
  }
  const there = children.filter((child) => child !== null && child !== undefined);
  element.append(...there.map((child) => (child instanceof Node ? child : printable(String(child)))));
  return element;
}

function choose(label, options, value, onchange) {
  const select = make("select", { onchange: () => onchange(select.value), "aria-label": label });
  for (const [key, text] of options) select.append(make("option", { value: key, selected: key === String(value) }, text));
  return make("label", {}, label, select);
}

const percent = (value) => (value === null || value === undefined ? "-" : `${(100 * value).toFixed(1)}%`);
const number = (value) => (value === null || value === undefined ? "-" : String(Number(value.toPrecision(4))));
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A key has the meaning of the longest known key that it begins with.
function explain(key) {
  const known = Object.keys(glossary).filter((name) => key === name || key.startsWith(`${name}/`) || key.startsWith(`${name}_`));
  known.sort((a, b) => b.length - a.length);
  return glossary[known[0] ?? `${key.split("/")[0]}/*`] ?? "";
}

// State. The part of the address after # restores the view, so it can be shared along with the file.

let runs = [];
const state = { view: "overview", smooth: "0.6", seeds: "apart", search: "", one: {}, left: {}, right: {}, timeRun: 0 };

function readAddress() {
  const address = new URLSearchParams(location.hash.slice(1));
  if (VIEWS.includes(address.get("view"))) state.view = address.get("view");
  for (const side of SIDES) {
    if (address.has(side)) {
      const [run, trace, group, member] = address.get(side).split(",");
      Object.assign(state[side], { run: Number(run), trace, group: Number(group), member: Number(member) });
    }
  }
}

function writeAddress() {
  const address = new URLSearchParams({ view: state.view });
  for (const side of SIDES) {
    const { run, trace, group, member } = state[side];
    if (trace) address.set(side, [run, trace, group, member].join(","));
  }
  history.replaceState(null, "", `#${address}`);
}

// Plots.

function layout(extra = {}) {
  const axis = { gridcolor: color("--line"), zerolinecolor: color("--line"), automargin: true };
  return {
    margin: { l: 46, r: 10, t: 6, b: 30 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    font: { color: color("--text"), size: 11 }, showlegend: false, hovermode: "x unified",
    hoverlabel: { bgcolor: color("--card") },
    ...extra, xaxis: { ...axis, ...extra.xaxis }, yaxis: { ...axis, ...extra.yaxis },
  };
}

function draw(element, lines, extra) {
  Plotly.react(element, lines, layout(extra), { displaylogo: false, responsive: true, displayModeBar: false });
}

function smoothed(values, weight) {
  let last = null, total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    last = last === null ? value * (1 - weight) : last * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return last / total;
  });
}

// Steps that are done: a rollout of step 0 is sampled before any, an evaluation in its row is played after it.
function series(run, key) {
  const values = run.metrics.values[key] ?? [];
  const done = key.startsWith("eval/") && !key.startsWith("eval/initial_") ? 1 : 0;
  const at = run.metrics.steps.map((_, index) => index).filter((index) => values[index] !== null && values[index] !== undefined);
  return { x: at.map((index) => run.metrics.steps[index] + done), y: at.map((index) => values[index]) };
}

// A page of a long run leaves out steps, so that there is room for trajectories.
function thinned({ metrics }) {
  const there = metrics.steps.length;
  return there < metrics.num_steps ? `, ${there} of ${metrics.num_steps} steps, evaluations among them` : "";
}

function lines(key) {
  const weight = Number(state.smooth);
  if (state.seeds === "together") return spreads(key, weight);
  return runs.flatMap((run, index) => {
    const { x, y } = series(run, key);
    if (!x.length) return [];
    const line = { x, type: "scatter", mode: x.length > 1 ? "lines" : "markers", line: { color: COLORS[index % COLORS.length] } };
    const raw = { ...line, y, name: run.name, opacity: weight ? 0.3 : 1, showlegend: !weight, hoverinfo: weight ? "skip" : "all" };
    return weight ? [raw, { ...line, y: smoothed(y, weight), name: run.name }] : [raw];
  });
}

// Runs that differ by their seed only: their mean, and the band from minimum to maximum.
function spreads(key, weight) {
  const kinds = [...new Set(runs.map((run) => run.alike))];
  return kinds.flatMap((alike, index) => {
    const members = runs.filter((run) => run.alike === alike).map((run) => series(run, key)).filter((one) => one.x.length);
    if (!members.length) return [];
    const steps = [...new Set(members.flatMap((one) => one.x))].sort((a, b) => a - b);
    const at = members.map((one) => new Map(one.x.map((x, i) => [x, smoothed(one.y, weight)[i]])));
    const there = steps.map((step) => at.map((one) => one.get(step)).filter((value) => value !== undefined));
    const name = `${runs.find((run) => run.alike === alike).name} (${members.length} seeds)`;
    const line = { x: steps, type: "scatter", mode: "lines", line: { color: COLORS[index % COLORS.length] } };
    const edge = { ...line, line: { width: 0 }, hoverinfo: "skip" };
    return [
      { ...edge, y: there.map((values) => Math.min(...values)) },
      { ...edge, y: there.map((values) => Math.max(...values)), fill: "tonexty", fillcolor: `${COLORS[index % COLORS.length]}33` },
      { ...line, y: there.map((values) => values.reduce((a, b) => a + b) / values.length), name },
    ];
  });
}

// The views. Each fills `root`; `refresh` fills it again after new data or a change of theme.

function overview(root) {
  const heads = ["run", "set", "success", "95% interval", "before training", "random", "optimum", "prompts", "steps", "minutes without warm start"];
  const outcome = make("table", { class: "outcome" }, make("tr", {}, ...heads.map((head) => make("th", { title: glossary[`eval/${head}`] ?? null }, head))));
  const row = (index, ...cells) => outcome.append(make("tr", {}, make("td", { style: `color:${COLORS[index % COLORS.length]}` }, runs[index].name), ...cells.map((cell, at) => make("td", { class: at ? "number" : "" }, String(cell)))));
  for (const [index, run] of runs.entries()) {
    const { summary } = run;
    const done = run.metrics.steps.length ? run.metrics.steps.at(-1) + 1 : 0;
    if (!summary) row(index, "still training, or stopped", "", "", "", "", "", "", `${done} of ${run.config.train?.num_steps}`, "");
    for (const [name, result] of Object.entries(summary?.sets ?? {})) {
      const before = summary.warm_start?.[name]?.success;
      row(index, name, percent(result.success), `${percent(result.ci_low)} - ${percent(result.ci_high)}`, percent(before), percent(result.random), percent(result.optimum), result.num_prompts, summary.steps, (summary.seconds / 60).toFixed(1));
    }
  }
  const plot = make("div", { class: "plot tall" });
  root.append(make("div", { class: "card" }, outcome), make("h2", {}, "Success in training (line) and on the held-out prompts (dots)"), plot);
  const held = runs.map((run) => ["eval/initial_success", "eval/success"].map((key) => series(run, key)));
  const evaluations = held.map(([before, after], index) => ({ x: [...before.x, ...after.x], y: [...before.y, ...after.y], type: "scatter", mode: "markers", name: `${runs[index].name}, held out`, marker: { color: COLORS[index % COLORS.length], size: 9 } }));
  const players = [["random", "dot"], ["optimum", "dash"]].map(([player, dash]) => ({ ...series(runs[0], `rollout/${player}`), type: "scatter", mode: "lines", name: `${player} player`, line: { color: color("--dim"), dash, width: 1 } }));
  draw(plot, [...lines("rollout/success"), ...[...evaluations, ...players].filter((one) => one.x.length)], { showlegend: true, legend: { orientation: "h", y: -0.15 }, yaxis: { rangemode: "tozero", tickformat: ".0%" }, xaxis: { title: { text: "steps done" } } });
  for (const [index, run] of runs.entries()) {
    const warnings = run.events.map((event) => make("tr", {}, make("td", { class: "number" }, `step ${event.step}`), make("td", { class: "warn" }, event.text)));
    root.append(make("h2", { style: `color:${COLORS[index % COLORS.length]}` }, `${run.name}${thinned(run)}`),
      make("div", { class: "card" },
        make("table", {}, ...factsOf(run).map(([name, value]) => make("tr", {}, make("th", {}, name), make("td", {}, String(value))))),
        make("h2", {}, "Warnings"), warnings.length ? make("table", { class: "warnings" }, ...warnings) : make("span", { class: "dim" }, "none"),
        make("details", {}, make("summary", {}, "every setting"), make("pre", {}, JSON.stringify(run.config, null, 1)))));
  }
}

function factsOf(run) {
  const { advantage, environment, filter, model, parallel, provenance, rollout, train } = run.config;
  const start = provenance?.at(-1); // the latest of them
  return [
    ["environments", environment?.environments],
    ["model", model?.load ?? `small model, ${model?.num_layers} layers of width ${model?.hidden_size}`],
    ["algorithm", `${advantage?.advantage_estimator}, filter ${filter?.filter_strategy} ${filter?.filter_value ?? ""}`],
    ["rollout", `${rollout?.num_groups} groups of ${rollout?.group_size}, ${rollout?.rollout_engine}`],
    ["layout", `tensor ${parallel?.tensor_model_parallel_size}, pipeline ${parallel?.pipeline_model_parallel_size}`],
    ["seed", train?.seed],
    ["hardware and versions", run.summary?.hardware ?? start?.hardware],
    ["command", start?.command],
    ["commit", start?.commit],
  ].filter(([, value]) => value !== undefined && value !== null);
}

function curves(root) {
  const search = make("input", { id: "search", type: "search", placeholder: "search metrics", value: state.search, "aria-label": "search metrics" });
  const grid = make("div", { class: "grid" });
  const visible = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((one) => one.isIntersecting)) {
      visible.unobserve(entry.target);
      draw(entry.target, lines(entry.target.dataset.key));
    }
  });
  const stages = Object.keys(glossary).map((key) => key.split("/")[0]);
  const stage = (key) => stages.indexOf(key.split("/")[0]);
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.metrics.values)))].sort((a, b) => stage(a) - stage(b));
  const fill = () => {
    visible.disconnect();
    const words = state.search.toLowerCase().split(/\s+/);
    const shown = keys.filter((key) => words.every((word) => `${key} ${explain(key)}`.toLowerCase().includes(word)));
    grid.replaceChildren(...shown.map((key) => {
      const plot = make("div", { class: "plot", "data-key": key });
      visible.observe(plot);
      return make("div", { class: "panel card", title: explain(key) }, make("h3", {}, key), make("p", {}, explain(key)), plot);
    }));
    if (!shown.length) grid.append(make("p", { class: "dim" }, "no metric has these words"));
  };
  search.addEventListener("input", () => { state.search = search.value; fill(); });
  const bar = make("div", { class: "bar" }, search,
    choose("smoothing", [["0", "none"], ["0.6", "some"], ["0.9", "much"]], state.smooth, (value) => { state.smooth = value; fill(); }),
    choose("seeds", [["apart", "each run"], ["together", "mean and range of seeds"]], state.seeds, (value) => { state.seeds = value; fill(); }),
    ...runs.map((run, index) => make("span", { style: `color:${COLORS[index % COLORS.length]}` }, `${run.name}${thinned(run)}`)));
  root.append(bar, grid);
  fill();
}

function trajectories(root) {
  const pane = make("div", {});
  root.append(pane);
  return browse(pane, state.one);
}

async function compare(root) {
  const last = runs.length - 1;
  const first = runs[0].traces.find((one) => one.kind === "eval");
  if (!state.left.trace) Object.assign(state.left, { run: 0, trace: first?.id });
  if (!state.right.trace) Object.assign(state.right, { run: last, kind: first && kindOf(first) });
  const panes = [make("div", {}), make("div", {})];
  root.append(make("p", { class: "dim" }, "The prompts of evaluations are the same at every step: choose the same one on both sides."), make("div", { class: "pair" }, ...panes));
  await Promise.all([browse(panes[0], state.left), browse(panes[1], state.right)]);
}

function time(root) {
  const plot = make("div", { class: "plot tall" });
  const index = runs[state.timeRun] ? state.timeRun : 0;
  const run = runs[index];
  root.append(make("div", { class: "bar" }, choose("run", runs.map((one, index) => [String(index), one.name]), state.timeRun, (value) => { state.timeRun = Number(value); refresh(); }), make("span", { class: "dim" }, `seconds of a step by phase; a phase does not count what runs inside it${thinned(run)}`), ...timelineOf(run, index)), plot);
  const keys = Object.keys(run.metrics.values).filter((key) => key.startsWith("time/") && !key.startsWith("time/sync_") && key !== "time/step");
  const parts = keys.map((key, index) => ({ x: run.metrics.steps, y: run.metrics.values[key].map((value) => value ?? 0), name: printable(key.slice(5)), stackgroup: "step", type: "scatter", line: { width: 0.5, color: COLORS[index % COLORS.length] } }));
  draw(plot, parts, { showlegend: true, yaxis: { title: { text: "seconds" } }, xaxis: { title: { text: "step" } } });
}

// What every rank did, to be opened by another program.
function timelineOf(run, index) {
  if (!run.timeline) return [make("span", { class: "dim" }, "no timeline of the ranks (--timeline)")];
  const save = make("button", { id: "timeline", onclick: async () => {
    cache.delete(`${index}/timeline`); // it grows
    const file = new Blob([JSON.stringify(await readTrace(index, "timeline"))], { type: "application/json" });
    const link = make("a", { href: URL.createObjectURL(file), download: `${run.name}-timeline.json` });
    link.click();
    URL.revokeObjectURL(link.href);
  } }, "save the timeline of all ranks");
  return [save, make("span", { class: "dim" }, "and open it in ", make("a", { href: "https://ui.perfetto.dev", target: "_blank", rel: "noopener" }, "ui.perfetto.dev"))];
}

// The browser of trajectories: which step on the left, one trajectory as a chat on the right.

async function browse(root, at) {
  at.run = runs[at.run] ? at.run : 0;
  const index = runs[at.run].traces;
  if (!index.length) {
    root.replaceChildren(make("p", { class: "dim" }, "This run kept no trajectories for reading; train with --trace-groups 4."));
    return;
  }
  const kinds = [...new Set(index.map(kindOf))].sort().reverse(); // training first
  const named = index.find((one) => one.id === at.trace);
  if (named) at.kind = kindOf(named);
  if (!kinds.includes(at.kind)) at.kind = kinds[0];
  const mine = index.filter((one) => kindOf(one) === at.kind);
  if (!named) at.trace = mine.at(-1).id;
  const place = mine.findIndex((one) => one.id === at.trace);
  const trace = await readTrace(at.run, at.trace);
  const again = () => browse(root, at).then(writeAddress);
  const slider = make("input", { type: "range", min: 0, max: mine.length - 1, value: place, "aria-label": "step", onchange: () => go(Number(slider.value)) });
  const go = (to) => {
    if (mine[to]) { at.trace = mine[to].id; again(); }
  };
  const typed = make("input", { type: "number", class: "step", value: mine[place].step, style: "width:80px", "aria-label": "step number", onchange: () => {
    const distance = (one) => Math.abs(one.step - Number(typed.value));
    go(mine.indexOf(mine.reduce((best, one) => (distance(one) < distance(best) ? one : best))));
  } });
  const text = make("input", { id: "search", type: "search", placeholder: "text or > 0.5 of reward", value: at.text ?? "", "aria-label": "search trajectories", oninput: () => { at.text = text.value; list(); } });
  const bar = make("div", { class: "bar" },
    runs.length > 1 ? choose("run", runs.map((one, i) => [String(i), one.name]), at.run, (value) => { at.run = Number(value); delete at.trace; again(); }) : null,
    choose("of", kinds.map((kind) => [kind, kind]), at.kind, (value) => { at.kind = value; delete at.trace; again(); }),
    make("label", {}, "step", typed), slider, text,
    choose("show", [["", "all"], ["good", "successes"], ["bad", "failures"], ["kept", "trained on"], ["cut", "truncated"], ["budget", "cut by the budget"], ["environment", "cut by the environment"], ["context", "cut by the context"], ["time", "cut by the time limit"], ["error", "errors"]], at.only ?? "", (value) => { at.only = value; list(); }),
    choose("color", [["", "none"], ...channelNames(trace).map((name) => [name, name])], at.channel ?? "", (value) => { at.channel = value; show(); }));
  const members = make("div", { class: "members" });
  const chat = make("div", { class: "chat" });
  const list = () => {
    members.replaceChildren();
    let found = null;
    at.order = [];
    trace.groups.forEach((group, g) => {
      const fitting = group.members.map((_, m) => m).filter((m) => fits(trace, group, group.members[m], at));
      if (!fitting.length) return;
      members.append(make("div", { class: "group" }, `${group.environment}, prompt ${group.seed}${at.kind === "training" ? (group.kept ? ", trained on" : ", filtered out") : ""}`));
      for (const m of fitting) {
        const one = group.members[m];
        const isHere = g === at.group && m === at.member;
        if (isHere) found = [g, m];
        at.order.push([g, m]);
        members.append(make("button", { class: "member", "aria-current": String(isHere), "data-at": `${g},${m}`, onclick: () => select(g, m) },
          make("span", { class: one.success ? "good" : "bad" }, one.success ? "solved" : one.truncated_by ? `cut: ${one.truncated_by}` : one.truncated ? "cut" : "failed"),
          make("span", { class: "dim" }, `${one.turns.length} turns, ${one.tokens.length} tokens`),
          make("span", { class: "reward" }, number(one.reward))));
      }
    });
    if (!at.order.length) members.append(make("p", { class: "dim" }, trace.note ?? "no trajectory of this step fits"));
    if (!found && at.order.length) [at.group, at.member] = at.order[0];
    mark();
    show();
  };
  const mark = () => {
    for (const button of members.querySelectorAll(".member")) button.setAttribute("aria-current", String(button.dataset.at === `${at.group},${at.member}`));
  };
  const select = (g, m) => { [at.group, at.member] = [g, m]; mark(); show(); };
  const show = () => {
    const one = trace.groups[at.group]?.members[at.member];
    chat.replaceChildren(...(one && at.order.length ? transcript(trace, one, at.channel, at.text) : []));
    writeAddress();
  };
  at.go = (by) => go(place + by);
  at.next = (by) => {
    const here = at.order.findIndex(([g, m]) => g === at.group && m === at.member);
    if (at.order[here + by]) select(...at.order[here + by]);
    members.querySelector('[aria-current="true"]')?.scrollIntoView({ block: "nearest" });
  };
  root.replaceChildren(bar, make("div", { class: "browser" }, members, chat));
  list();
}

const kindOf = (trace) => (trace.kind === "step" ? "training" : `evaluation, ${trace.set}`);

function channelNames(trace) {
  const names = [...new Set(trace.groups.flatMap((group) => group.members.flatMap((one) => Object.keys(one.channels))))];
  return names.includes("trainer log-probability") ? [...names, "trainer over engine"] : names;
}

function channel(one, name) {
  if (name !== "trainer over engine") return one.channels[name];
  const trainer = one.channels["trainer log-probability"];
  return trainer?.map((value, i) => Math.exp(value - one.channels["engine log-probability"][i]));
}

function fits(trace, group, one, at) {
  const only = { good: one.success, bad: !one.success, kept: one.kept ?? group.kept, cut: one.truncated, [one.truncated_by]: true, error: one.turns.some((turn) => turn.info.error || turn.info.failed_attempts) };
  if (at.only && !only[at.only]) return false;
  const bound = /^\s*([<>])\s*(-?[\d.]+)\s*$/.exec(at.text ?? "");
  if (bound) return bound[1] === ">" ? one.reward > Number(bound[2]) : one.reward < Number(bound[2]);
  return !at.text || one.tokens.map((token) => trace.strings[token]).join("").toLowerCase().includes(at.text.toLowerCase());
}

function transcript(trace, one, channelName, searched) {
  const strings = one.tokens.map((token) => trace.strings[token]);
  const values = channelName ? channel(one, channelName) : null;
  const parts = [make("div", { class: "bar facts" }, make("b", { class: one.success ? "good" : "bad" }, one.success ? "solved" : "not solved"), ...[`reward ${number(one.reward)}`, one.terminated ? "ended by the environment" : one.truncated_by ? `cut by ${CUT[one.truncated_by]}` : "cut off"].map((fact) => make("span", { title: `outcome seed ${one.outcome_seed}; sampled under weights ${one.weight_version}: how often the engine has loaded weights, evaluations included; with --placement separate the steps that they were trained for` }, fact))),
    make("div", { id: "token", class: "facts" }, channelName && !values ? "this trajectory was not trained on: it has no such number" : "point at a token to read its numbers")];
  const detail = parts[1];
  const tree = callTree(one, (t) => parts[first + t].scrollIntoView({ block: "start" }));
  if (tree) parts.push(tree);
  const first = parts.length; // where the turns begin
  const scale = values ? largest(trace, channelName) : 1;
  let sampled = 0, position = 0;
  one.turns.forEach((turn, t) => {
    const prompt = strings.slice(position, turn.start);
    const said = isBranch(one, t)
      ? make("details", { class: "message user" }, make("summary", {}, `a branch: this call saw ${prompt.length} tokens, the last messages are\n${lastMessages(turn.info.call)}`), ...plain(prompt, searched))
      : make("div", { class: "message user", title: "what the environment said; 'N left' are the actions, or turns where answers are text, that the budget still allows" }, ...plain(prompt, searched));
    const answer = make("div", { class: "message agent" });
    for (let i = turn.start; i < turn.end; i++, sampled++) {
      const mine = sampled;
      const token = make("span", { class: isSpecial(strings[i]) ? "token special" : "token", onmouseenter: () => { detail.textContent = printable(numbersOf(one, strings[i], mine)); } }, strings[i]);
      const value = values?.[mine];
      if (value !== null && value !== undefined) {
        const shift = (value - middle(channelName)) / scale;
        token.style.background = `rgba(${color(shift < 0 ? "--low" : "--high")}, ${(0.75 * Math.abs(shift)).toFixed(3)})`;
      }
      answer.append(token);
    }
    position = turn.end;
    const { info } = turn;
    const terms = info.rewards ? ` (${Object.entries(info.rewards).map(([name, value]) => `${name} ${number(value)}`).join(", ")})` : "";
    const facts = make("div", { class: "facts" }, make("b", {}, info.call ? `${nameOf(info.call)}: ` : `turn ${t + 1}: `), `reward ${number(turn.reward)}${terms}`, info.actions?.length ? `, did ${[].concat(info.actions).join(", ")}` : "", info.is_format_valid === false ? make("span", { class: "bad" }, ", malformed answer") : "", info.finish_reason === "length" ? make("span", { class: "warn" }, ", cut at the length limit") : "", info.error ? make("span", { class: "bad" }, `, ${info.error}`) : "", info.outcome ? `, returned ${JSON.stringify(info.outcome)}` : "", ...(info.failed_attempts ?? []).map((failure) => make("span", { class: "warn" }, `, played again after: ${failure.error}`)));
    parts.push(make("div", { class: "turn" }, picture(one.pictures[t]), make("div", { class: "body" }, said, answer, facts)));
  });
  if (one.pictures.length) parts.push(make("div", { class: "turn" }, picture(one.pictures.at(-1)), make("div", { class: "body facts" }, "after the last turn")));
  return parts;
}

// An agent's episode: its calls below the answer that each continues, with who asked, tools and rewards.

const nameOf = (call) => `call-${call.index}-${call.answer}${call.role ? ` of ${call.role}` : ""}`;
const lastMessages = (call) => call.messages.slice(-2).map((message) => `${message.role}: ${message.content.slice(0, 200)}`).join("\n");

// Whether the prompt of a turn does not go on from the turn before it.
function isBranch(one, t) {
  const before = one.turns[t - 1]?.info.call;
  const { call } = one.turns[t].info;
  return Boolean(before && call && !(call.parent?.[0] === before.index && call.parent[1] === before.answer));
}

function callTree(one, goTo) {
  const places = one.turns.flatMap((turn, t) => (turn.info.call ? [{ call: turn.info.call, turn, t }] : []));
  const all = [...places, ...(one.turns.at(-1)?.info.untrained_calls ?? []).map((call) => ({ call }))];
  if (!all.length) return null;
  const below = (parent) => all
    .filter(({ call }) => String(call.parent) === String(parent))
    .sort((a, b) => a.call.index - b.call.index || a.call.answer - b.call.answer);
  const rows = (parent) => below(parent).map(({ call, turn, t }) => make("li", {},
    make("button", { class: "call", disabled: !turn, onclick: () => goTo(t) }, nameOf(call)), " ",
    call.reply.tool_calls.length ? make("b", {}, call.reply.tool_calls.map((tool) => `${tool.name}(${tool.arguments})`).join(", ")) : call.reply.content.slice(0, 80),
    make("span", { class: "dim" }, turn ? (turn.reward ? `, reward ${number(turn.reward)}` : "") : ", not trained"),
    nested(call)));
  const nested = (call) => {
    const children = rows([call.index, call.answer]);
    return children.length ? make("ul", {}, ...children) : null;
  };
  return make("div", { id: "calls", class: "card" }, make("div", { class: "dim" }, "calls of the agent, each below the answer that it continues"), make("ul", {}, ...rows(null)));
}

// Over all trajectories of the step, so that their colors can be compared.
function largest(trace, name) {
  const all = trace.groups.flatMap((group) => group.members.flatMap((one) => channel(one, name) ?? []));
  return all.reduce((most, value) => Math.max(most, Math.abs((value ?? middle(name)) - middle(name))), 1e-9);
}

const middle = (name) => (name === "trainer over engine" ? 1 : 0);
const isSpecial = (text) => /^(<\|.*\|>|<\/?(think|answer)>)$/.test(text);

function plain(strings, searched) {
  const text = strings.join("");
  const at = searched ? text.toLowerCase().indexOf(searched.toLowerCase()) : -1;
  if (at >= 0) return [text.slice(0, at), make("mark", {}, text.slice(at, at + searched.length)), text.slice(at + searched.length)];
  return strings.map((one) => (isSpecial(one) ? make("span", { class: "special" }, one) : one));
}

function numbersOf(one, text, at) {
  const numbers = Object.keys(one.channels).map((name) => `${name} ${number(one.channels[name][at])}`);
  return [JSON.stringify(text), ...numbers].join(" \u00b7 ");
}

// Shown as an image, a picture cannot run a script.
function picture(drawn) {
  if (drawn === undefined) return null;
  const content = drawn.startsWith("<svg") ? make("img", { src: `data:image/svg+xml,${encodeURIComponent(drawn)}`, alt: "the world before this turn" }) : make("pre", {}, drawn);
  return make("div", { class: "picture" }, content);
}

// The page as a whole.

async function refresh() {
  const root = document.getElementById("view");
  const fresh = make("div", {});
  for (const button of document.querySelectorAll("#tabs button")) button.setAttribute("aria-selected", String(button.dataset.view === state.view));
  root.replaceChildren(fresh);
  await { overview, curves, trajectories, compare, time }[state.view](fresh);
  writeAddress();
}

function open(view) {
  state.view = view;
  refresh();
}

document.getElementById("tabs").append(...VIEWS.map((view) => make("button", { role: "tab", "data-view": view, onclick: () => open(view) }, view)));
document.getElementById("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  refresh();
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const act = { ArrowLeft: () => state.one.go?.(-1), ArrowRight: () => state.one.go?.(1), j: () => state.one.next?.(1), k: () => state.one.next?.(-1), t: () => document.getElementById("theme").click(), "/": () => document.getElementById("search")?.focus() }[event.key];
  if (act) { event.preventDefault(); act(); }
  else if (VIEWS[Number(event.key) - 1]) open(VIEWS[Number(event.key) - 1]);
});

async function readAgain() {
  const contents = () => runs.map((run) => [run.metrics.num_steps, run.traces.length, run.events.length, Boolean(run.summary)]).join();
  const before = contents();
  runs = await readRuns().catch(() => runs);
  if (contents() !== before && !document.activeElement.matches("input, select")) await refresh();
}

(async () => {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  readAddress();
  runs = await readRuns();
  if (runs.length === 1) document.title = runs[0].name;
  await refresh();
  if (isLive) {
    document.getElementById("live").hidden = false;
    setInterval(readAgain, 1000 * SECONDS_BETWEEN_READS);
  }
})();
