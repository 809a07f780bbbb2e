// The page of `unisono board`, live and as a file. Text from runs is only ever set as text, never as markup.
(() => {
  "use strict";
  const REGIONS = ["status", "verdict", "curves", "rollouts", "ranks", "data", "checkpoints", "samples", "config", "log"];
  const SHARED = new Set(["curves", "config"]); // show all runs together
  const OF_ANSWERS = ["answer_tokens", "truncated", "equal_groups", "entropy", "kl", "sampler_kl"];
  const FIRST = ["loss", "eval_loss", "lr", "grad_norm", "tokens_per_second", "memory_bytes", "expert_load_max"];
  const WHOLE = Array.from({ length: 36 }, (_, at) => [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3)); // steps between ticks
  const HIDDEN = new Set(["time_s", "total_steps", "step"]);
  const DASHES = [[], [9, 4], [2, 3], [10, 3, 2, 3], [5, 2], [14, 4, 4, 4], [1, 5]];
  const COLOURS = { light: ["#0b5fa5", "#b94a00", "#0c7a5b", "#8a3d8c", "#6d5a00", "#c2286b", "#3d4655", "#1483b4"],
    dark: ["#6cb4ff", "#ff9d5c", "#5fd0a8", "#d59be0", "#d8c04a", "#ff8fb8", "#c3ccd8", "#7fd3f7"] };
  const json = (id) => { const node = document.getElementById(id); return node ? JSON.parse(node.textContent) : null; };
  const WORDS = json("words"), FILE = json("data"), IS_LIVE = FILE === null;

  // ---- language, numbers, words
  const asked = new URLSearchParams(location.search).get("lang");
  const LANG = ["en", "zh"].includes(asked) ? asked
    : (navigator.languages || [navigator.language || "en"]).map((one) => one.slice(0, 2)).find((one) => one === "en" || one === "zh") || "en";
  document.documentElement.lang = LANG === "zh" ? "zh-CN" : "en";
  const locale = LANG === "zh" ? "zh-CN" : "en";
  const plainNumber = new Intl.NumberFormat(locale, { maximumFractionDigits: 0 });
  const precise = new Intl.NumberFormat(locale, { maximumSignificantDigits: 4 });
  const clock = new Intl.DateTimeFormat(locale, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
  const day = new Intl.DateTimeFormat(locale, { dateStyle: "medium", timeStyle: "short" });
  const t = (name, values = {}) => (WORDS[LANG][name] ?? name).replace(/\{(\w+)\}/g, (_, key) => String(values[key] ?? ""));
  const number = (value) => {
    if (value === null || value === undefined) return "–";
    if (typeof value !== "number") return String(value);
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(3).replace("e+", "e");
    return Number.isInteger(value) ? plainNumber.format(value) : precise.format(value);
  };
  const duration = (s) => {
    if (s === null || s === undefined || !isFinite(s)) return "–";
    const unit = LANG === "zh" ? ["秒", "分", "小时"] : ["s", "min", "h"];
    if (s < 10) return `${precise.format(Math.round(s * 10) / 10)} ${unit[0]}`;
    const whole = Math.round(s), minutes = Math.floor(whole / 60);
    if (whole < 60) return `${whole} ${unit[0]}`;
    if (minutes < 60) return `${minutes} ${unit[1]} ${String(whole % 60).padStart(2, "0")} ${unit[0]}`;
    return `${plainNumber.format(Math.floor(minutes / 60))} ${unit[2]} ${String(minutes % 60).padStart(2, "0")} ${unit[1]}`;
  };
  const bytes = (n) => {
    if (n === null || n === undefined) return "–";
    const units = ["B", "kB", "MB", "GB", "TB"];
    let at = 0;
    while (n >= 999.5 && at < 4) { n /= 1000; at += 1; }
    return `${new Intl.NumberFormat(locale, { maximumSignificantDigits: 3 }).format(n)} ${units[at]}`;
  };
  const when = (iso) => { const date = new Date(iso); return isNaN(date) ? String(iso ?? "–") : day.format(date); };

  // ---- elements
  const h = (tag, props = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(props)) {
      if (value === null || value === undefined || value === false) continue;
      if (name === "on") for (const [event, call] of Object.entries(value)) node.addEventListener(event, call);
      else if (name === "class") node.className = value;
      else if (name in node && !["list", "form"].includes(name) && typeof value !== "string") node[name] = value;
      else node.setAttribute(name, value === true ? "" : String(value));
    }
    for (const child of children.flat(3)) if (child !== null && child !== undefined && child !== false) node.append(child instanceof Node ? child : String(child));
    return node;
  };
  const put = (node, ...children) => {
    // details that were opened stay open, and the focus stays where it was
    const open = new Map([...node.querySelectorAll("details[data-keep]")].map((one) => [one.dataset.keep, one.open]));
    const scrolled = new Map([...node.querySelectorAll("[data-scroll]")].map((one) => [one.dataset.scroll, [one.scrollTop, one.scrollLeft]]));
    const focus = node.contains(document.activeElement) ? document.activeElement.closest("[data-keep]")?.dataset.keep : null;
    node.replaceChildren(...children.flat(3).filter((one) => one !== null && one !== undefined && one !== false));
    for (const one of node.querySelectorAll("details[data-keep]")) if (open.has(one.dataset.keep)) one.open = open.get(one.dataset.keep);
    for (const one of node.querySelectorAll("[data-scroll]")) if (scrolled.has(one.dataset.scroll)) [one.scrollTop, one.scrollLeft] = scrolled.get(one.dataset.scroll);
    const kept = focus ? [...node.querySelectorAll("[data-keep]")].find((one) => one.dataset.keep === focus) : null;
    (kept?.querySelector("summary") ?? kept)?.focus({ preventScroll: true });
  };
  const table = (caption, head, rows, { tall = false, keep = caption, cls = "" } = {}) => h("div", { class: `scroll ${tall ? "tall" : ""}`, tabindex: "0", role: "region", "aria-label": `${t("table")}: ${caption}`, "data-scroll": keep },
    h("table", { class: cls }, h("caption", { class: "sr" }, caption),
      h("thead", {}, h("tr", {}, head.map((one) => h("th", { scope: "col", class: one.cls ?? "" }, one.text ?? one)))),
      h("tbody", {}, rows)));
  const cell = (content, cls = "") => h("td", { class: cls }, content);
  const empty = (name) => h("p", { class: "empty" }, t(name));
  const fold = (keep, title, ...inner) => h("details", { "data-keep": keep }, h("summary", {}, title), h("div", { class: "inner" }, ...inner));
  const canvasOf = (node, height) => {
    const width = Math.max(40, node.clientWidth), scale = devicePixelRatio || 1;
    node.width = width * scale; node.height = height * scale;
    const context = node.getContext("2d");
    context.scale(scale, scale);
    return [context, width];
  };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const isDark = matchMedia("(prefers-color-scheme: dark)");

  // ---- state
  let runs = (FILE?.runs ?? []).map(({ name, path }) => ({ name, path }));
  const data = {}; // by run, by region
  for (const run of FILE?.runs ?? []) data[run.name] = run.regions;
  const hidden = new Set();
  const named = new URLSearchParams(location.search).get("run"), HOME = json("home");
  let current = runs[0]?.name ?? null;
  const view = { axis: "step", smoothing: 0, log: false, range: null, minutes: 0 };
  const bodies = {};
  const get = (region, run = current) => data[run]?.[region];
  const shownRuns = () => runs.filter((run) => !hidden.has(run.name));
  const colourOf = (name) => {
    const at = Math.max(0, runs.findIndex((run) => run.name === name)), list = COLOURS[isDark.matches ? "dark" : "light"];
    return { stroke: list[at % list.length], dash: DASHES[at % DASHES.length] };
  };

  // ---- frame
  const pill = h("span", { class: "pill", role: "status" }), banner = h("div", { class: "banner", role: "alert" });
  const picker = h("div"), legend = h("ul", { class: "legend" });
  const build = () => {
    const other = new URL(location.href);
    other.searchParams.set("lang", LANG === "zh" ? "en" : "zh");
    const sections = REGIONS.map((region) => {
      const body = bodies[region] = h("div", { class: "body" });
      const id = `h-${region}`;
      return h("section", { class: "region", id: region, "data-region": region, "aria-labelledby": id, hidden: region === "rollouts" },
        h("div", { class: "head" }, h("h2", { id }, t(region)), headOf(region)), body);
    });
    document.getElementById("page").replaceChildren(
      h("a", { class: "skip", href: "#main" }, t("skip")),
      h("header", { class: "top" }, h("div", { class: "bar" },
        h("div", { class: "brand" }, h("span", { class: "mark", "aria-hidden": "true" }, h("i"), h("i"), h("i")), h("h1", {}, "unisono board")),
        h("nav", { "aria-label": t("regions") }, h("ul", { tabindex: "-1" }, REGIONS.map((one) => h("li", { "data-for": one, hidden: one === "rollouts" }, h("a", { href: `#${one}` }, t(one)))))),
        picker, pill, HOME ? h("a", { href: HOME, class: "soft" }, "unisono studio") : null, h("a", { href: other.href, lang: LANG === "zh" ? "en" : "zh-CN", class: "soft" }, t("language")))),
      banner, h("main", { id: "main", tabindex: "-1" }, sections));
  };
  const headOf = (region) => {
    if (region === "ranks") return choice("window", t("window"), [["2", t("minutes", { n: 2 })], ["15", t("minutes", { n: 15 })], ["0", t("all")]], String(view.minutes), (value) => { view.minutes = Number(value); draw("ranks"); });
    if (region === "log") return logControls();
    return null;
  };
  const choice = (name, title, options, value, onChange) => h("fieldset", {}, h("legend", {}, title),
    options.map(([key, text, disabled]) => h("label", {}, h("input", { type: "radio", name, value: key, checked: key === value, disabled: Boolean(disabled), on: { change: () => onChange(key) } }), text)));
  const drawPicker = () => {
    if (runs.length < 2) { put(picker); return; }
    const select = h("select", { id: "pick", on: { change: (event) => { current = event.target.value; chosen.step = chosen.group = null; for (const region of REGIONS) { if (IS_LIVE) fetchRegion(current, region); draw(region); } } } },
      runs.map((run) => h("option", { value: run.name, selected: run.name === current }, run.name)));
    put(picker, h("label", {}, t("details_of"), select));
  };
  const problems = (region) => (get(region)?.problems ?? []).map((text) => h("p", { class: "note bad", role: "note" }, `${t("problem")}: ${text}`));

  // ---- status
  const TONE = { completed: "good", running: "", preempted: "warn", interrupted: "warn", unstarted: "", unknown: "" };
  const stateOf = (one) => t(one.stopped_by ? `stopped_${one.stopped_by}` : one.state);
  const badge = (one) => h("span", { class: `badge ${TONE[one.state] ?? "bad"} ${one.state === "running" ? "running" : ""}` }, stateOf(one));
  const tile = (name, value, cls = "") => value === "–" || value === null ? null : h("div", {}, h("dt", {}, t(name)), h("dd", { class: cls }, value));
  const swatch = (name) => {
    const node = h("canvas", { class: "swatch", "aria-hidden": "true" });
    requestAnimationFrame(() => {
      const [context, width] = canvasOf(node, 12), { stroke, dash } = colourOf(name);
      context.strokeStyle = stroke; context.lineWidth = 2.5; context.setLineDash(dash);
      context.beginPath(); context.moveTo(0, 6); context.lineTo(width, 6); context.stroke();
    });
    return node;
  };
  const translated = (one) => LANG === "zh" ? { ...one, ...one.chinese } : one;
  // a timeline is written every few seconds; each rank has its part in a step that is logged
  const stepOf = (row) => row.step === null ? null : Math.max(row.step, get("status")?.kind === "unisono" ? get("status").step : 0);
  const drawStatus = () => {
    const one = get("status");
    const parts = [];
    if (one?.moved_to) parts.push(h("p", { class: "note", role: "status" }, t("moved", { path: one.moved_to })));
    if (one) {
      parts.push(h("div", { class: "state" }, h("strong", {}, one.name), badge(one), one.exit_code !== null && one.exit_code !== undefined ? h("span", { class: "soft" }, `${t("exit_code")} ${one.exit_code}`) : null));
      parts.push(h("div", { class: "path" }, one.path));
      if (one.warning) parts.push(h("p", { class: "note bad", role: "status", "data-warning": "" }, one.warning));
      if (one.state === "dead") parts.push(h("p", { class: "note bad" }, t("dead_text")));
      for (const problem of one.result_problems ?? []) parts.push(h("p", { class: "note bad" }, [problem.what, problem.where, problem.why, problem.fix].filter(Boolean).join(" · ")));
      if (one.total_steps) parts.push(h("progress", { max: one.total_steps, value: Math.min(one.step, one.total_steps), "aria-label": t("step_of", { step: number(one.step), total: number(one.total_steps) }) }));
      parts.push(h("dl", { class: "tiles" },
        tile("step", one.total_steps ? t("step_of", { step: number(one.step), total: number(one.total_steps) }) : number(one.step)),
        tile("time_left", one.state === "running" ? duration(one.seconds_left) : "–"), tile("elapsed", duration(one.wall_time_s)),
        tile("reward", number(one.reward)), tile("eval_reward", number(one.eval_reward)), tile("loss", number(one.loss)), tile("eval_loss", number(one.eval_loss)), tile(one.unit, number(one.tokens)), tile(`${one.unit}_per_second`, number(one.tokens_per_second === null ? null : Math.round(one.tokens_per_second))),
        tile("world", number(one.world_size)), one.restarts ? tile("restarts", number(one.restarts)) : null,
        one.model ? tile("model", one.model, "wide") : null, one.resume ? tile("resume", translated(one).resume, "wide") : null));
      if (one.holder) parts.push(h("p", { class: "soft" }, t("held_by", { pid: one.holder.pid, host: one.holder.host, since: when(one.holder.since) })));
      const more = Object.entries(one.more ?? {});
      if (more.length) parts.push(h("p", { class: "soft path" }, more.map(([name, value]) => `${name}: ${JSON.stringify(value)}`).join(" · ")));
    }
    if (runs.length > 1) parts.push(h("h3", { class: "sub" }, t("last_values")), table(t("last_values"), [t("run"), t("state"), { text: t("step"), cls: "n" }, { text: t("loss"), cls: "n" }, { text: t("eval_loss"), cls: "n" }, { text: t("tokens_per_second"), cls: "n" }],
      runs.map((run) => { const s = get("status", run.name); return h("tr", {}, h("th", { scope: "row" }, run.name), cell(s ? badge(s) : "–"), ...["step", "loss", "eval_loss", "tokens_per_second"].map((key) => cell(number(s?.[key]), "n"))); })));
    put(bodies.status, problems("status"), parts);
    for (const row of get("ranks")?.ranks ?? []) { const at = bodies.ranks.querySelector(`[data-rank="${row.rank}"] .at`); if (at) at.textContent = number(stepOf(row)); }
    document.title = one ? `${stateOf(one)} · ${one.name} · unisono board` : "unisono board";
  };

  // ---- verdict
  const drawOne = (all, at, verdict = translated(all)) => h("div", { class: `block ${verdict.severity ?? ""}`, "data-cause": verdict.cause },
    h("dl", {}, verdict.lines.map(([label, text], line) => [h("dt", {}, t(label)), h("dd", { class: `${line === 0 ? "first" : ""} ${label === "EVIDENCE" ? "code" : ""}` }, text)])),
    verdict.explain ? h("p", {}, h("a", { href: `#cause-${at}-${verdict.explain.id}`, on: { click: () => { const place = document.getElementById(`cause-${at}-${verdict.explain.id}`); if (place) place.open = true; } } }, t("cause_link", { cause: verdict.explain.id }))) : null,
    verdict.explain ? drawCause(verdict.explain, at) : null);
  const drawCause = (cause, at) => h("details", { id: `cause-${at}-${cause.id}`, "data-keep": `cause-${at}-${cause.id}` }, h("summary", {}, `${cause.id}: ${cause.title}`),
    h("div", { class: "explain" }, h("p", {}, cause.meaning), h("h3", {}, t("signs")), h("ul", {}, cause.signs.map((one) => h("li", {}, one))),
      cause.similar.length ? [h("h3", {}, t("similar")), h("ul", {}, cause.similar.map(([id, text]) => h("li", {}, h("b", {}, id), `: ${text}`)))] : null,
      h("h3", {}, t("fix")), h("ol", {}, cause.fix.map((one) => h("li", {}, one)))));
  // a verdict is what one wants to read first; that there is none is not
  const placeVerdict = (verdict, curves, isFirst) => {
    if (Boolean(verdict.compareDocumentPosition(curves) & Node.DOCUMENT_POSITION_FOLLOWING) !== isFirst) curves[isFirst ? "before" : "after"](verdict);
  };
  const drawVerdict = () => {
    const region = get("verdict");
    if (!region) return;
    const earlier = region.earlier ?? [];
    put(bodies.verdict, problems("verdict"), region.verdict ? drawOne(region.verdict, "now") : empty("no_verdict"),
      earlier.length ? [h("h3", {}, t("earlier")), earlier.map((one, at) => drawOne(one, String(at)))] : null);
    for (const of of [(one) => bodies[one].closest("section"), (one) => document.querySelector(`[data-for=${one}]`)]) placeVerdict(of("verdict"), of("curves"), Boolean(region.verdict || earlier.length));
  };

  // ---- curves
  const cards = new Map();
  let curveGrid, moreGrid, moreFold, axisBox, isPainted = false;
  const buildCurves = () => {
    const smooth = h("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", on: { input: (event) => { view.smoothing = Number(event.target.value); updateCurves(); } } });
    const log = h("input", { type: "checkbox", on: { change: (event) => { view.log = event.target.checked; for (const card of cards.values()) card.dispose(); cards.clear(); curveGrid.replaceChildren(); moreGrid.replaceChildren(); updateCurves(); } } });
    const button = (sign, name, call) => h("button", { type: "button", "aria-label": t(name), title: t(name), on: { click: call } }, sign);
    curveGrid = h("div", { class: "grid" }); moreGrid = h("div", { class: "grid" });
    moreFold = h("details", { on: { toggle: () => updateCurves() } }, h("summary", {}), h("div", { class: "inner" }, moreGrid));
    axisBox = h("span");
    bodies.curves.replaceChildren(h("div", { class: "note-place" }), legend, h("div", { class: "controls" }, axisBox, h("label", {}, t("smoothing"), smooth), h("label", {}, log, t("log_scale")),
      h("span", { class: "zoom", role: "group", "aria-label": t("help_zoom"), title: t("help_zoom") }, button("+", "zoom_in", () => zoomBy(0.5)), button("−", "zoom_out", () => zoomBy(2)), button("←", "left", () => shift(-0.25)), button("→", "right", () => shift(0.25)), button("⤢", "reset", () => zoomTo(null)))),
      curveGrid, moreFold);
    drawAxis();
  };
  const drawAxis = () => {
    const has = (key) => shownRuns().some((run) => get("curves", run.name)?.series?.[key]);
    put(axisBox, choice("axis", t("x_axis"), [["step", t("by_step")], ["tokens", t("by_tokens"), !has("tokens")], ["time_s", t("by_time"), !has("time_s")]], view.axis, (value) => { view.axis = value; view.range = null; updateCurves(); }));
  };
  // x of a run's points: steps themselves, or tokens and time interpolated at these steps
  const placesOf = (name, steps) => {
    if (view.axis === "step") return steps;
    const other = get("curves", name)?.series?.[view.axis];
    if (!other) return null;
    let at = 0;
    const xs = other.steps, ys = other.values;
    let before = -Infinity;
    return steps.map((step) => {
      while (at < xs.length - 1 && xs[at + 1] <= step) at += 1;
      const next = Math.min(at + 1, xs.length - 1), span = xs[next] - xs[at];
      const value = span > 0 && step > xs[at] ? ys[at] + (ys[next] - ys[at]) * (step - xs[at]) / span : ys[at];
      before = value > before ? value : before + 1e-9;
      return before;
    });
  };
  const smoothed = (values) => {
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = sum * view.smoothing + value * (1 - view.smoothing);
      weight = weight * view.smoothing + (1 - view.smoothing);
      return sum / weight;
    });
  };
  const tablesOf = (key) => {
    const found = [];
    for (const run of shownRuns()) {
      const region = get("curves", run.name), series = (view.range && region?.detail?.[key]) || region?.series?.[key];
      if (!series || !series.steps.length) continue;
      const xs = placesOf(run.name, series.steps);
      if (!xs) continue;
      // uPlot wants ascending x; a step with two values keeps the last
      const rows = new Map();
      series.steps.forEach((_, at) => rows.set(xs[at], series.values[at]));
      const sorted = [...rows.keys()].sort((a, b) => a - b), values = sorted.map((x) => rows.get(x));
      found.push({ name: run.name, xs: sorted, values, marks: sorted.filter((_, at) => values[at] === null) });
    }
    return found;
  };
  // of three runs or more, those that would flatten the others: most of a run that has diverged is beyond any scale
  const topOf = (values) => values.reduce((top, value) => Math.max(top, Math.abs(value ?? 0)), 0);
  const farOf = (tables) => {
    if (view.log || tables.length < 3) return [];
    const tops = tables.map((one) => topOf(one.values)), middle = [...tops].sort((a, b) => a - b)[Math.floor((tops.length - 1) / 2)];
    return tables.filter((_, at) => middle > 0 && tops[at] > 20 * middle).map((one) => one.name);
  };
  class Card {
    constructor(key) {
      this.key = key; this.shape = ""; this.show = key.endsWith("_bytes") ? bytes : number;
      this.read = h("span", { class: "read" });
      this.plot = h("div", { class: "plot", tabindex: "0", role: "img", "aria-label": key, on: { keydown: (event) => this.onKey(event) } });
      this.details = h("details", { on: { toggle: () => this.drawTable() } }, h("summary", {}, t("table"), h("span", { class: "sr" }, ` ${key}`)), this.tableBox = h("div", { class: "inner" }));
      this.outside = h("p", { class: "soft outside" });
      this.node = h("div", { class: "chart", "data-curve": key }, h("div", { class: "title" }, h("h3", {}, key), this.read), this.plot, this.outside, this.details);
      this.isSeen = false; this.isDirty = true;
      this.watch = new IntersectionObserver(([entry]) => { this.isSeen = entry.isIntersecting; if (this.isSeen && this.isDirty) this.update(); }, { rootMargin: "300px" });
      this.watch.observe(this.node);
      this.resize = new ResizeObserver(() => { if (this.chart) this.chart.setSize({ width: this.plot.clientWidth, height: this.plot.clientHeight }); });
      this.resize.observe(this.plot);
    }
    dispose() { this.chart?.destroy(); this.watch.disconnect(); this.resize.disconnect(); this.node.remove(); }
    onKey(event) {
      const does = { "+": () => zoomBy(0.5), "=": () => zoomBy(0.5), "-": () => zoomBy(2), ArrowLeft: () => shift(-0.25), ArrowRight: () => shift(0.25), 0: () => zoomTo(null) }[event.key];
      if (does && !event.ctrlKey && !event.metaKey) { event.preventDefault(); does(); }
    }
    update() {
      if (!this.isSeen && isPainted && !matchMedia("print").matches) { this.isDirty = true; return; }
      this.isDirty = false;
      const tables = this.tables = tablesOf(this.key);
      document.documentElement.dataset.lines = String(tables.length);
      const last = tables.map((one) => one.values[one.values.length - 1]);
      const points = tables.reduce((sum, one) => sum + one.values.length, 0), nans = tables.reduce((sum, one) => sum + one.marks.length, 0);
      this.read.textContent = tables.length === 1 ? this.show(last[0]) + (nans ? ` · ${t("nan", { n: nans })}` : "") : nans ? t("nan", { n: nans }) : "";
      this.plot.setAttribute("aria-label", t("curve_of", { key: this.key, axis: t({ step: "by_step", tokens: "by_tokens", time_s: "by_time" }[view.axis]), n: number(points), first: number(tables[0]?.values[0]), last: last.map(number).join(", ") }) + (nans ? `, ${t("nan", { n: nans })}` : ""));
      const positive = (values) => view.log ? values.map((value) => value !== null && value > 0 ? value : null) : values;
      const joined = tables.map((one) => view.smoothing ? [one.xs, positive(one.values), positive(smoothed(one.values))] : [one.xs, positive(one.values)]);
      const lines = joined.length > 1 ? uPlot.join(joined) : joined[0] ?? [[], []];
      const outside = this.far = farOf(tables);
      this.outside.textContent = outside.length ? t("outside", { names: outside.join(", ") }) : "";
      const shape = JSON.stringify([outside, tables.map((one) => one.name), view.smoothing > 0, view.log, isDark.matches, view.axis]);
      if (shape !== this.shape || !this.chart) { this.chart?.destroy(); this.shape = shape; this.chart = this.make(tables, lines); } else this.chart.setData(lines, false);
      this.scale();
      if (this.details.open) this.drawTable();
    }
    scale() {
      if (!this.chart) return;
      const xs = this.chart.data[0], range = view.range ?? (xs.length > 1 ? [xs[0], xs[xs.length - 1]] : xs.length ? [xs[0] - 1, xs[0] + 1] : [0, 1]);
      this.chart.setScale("x", { min: range[0], max: range[1] });
    }
    make(tables, lines) {
      const soft = css("--soft"), line = css("--line"), font = `12px ${css("--sans")}`;
      const series = [{}];
      for (const one of tables) {
        const { stroke, dash } = colourOf(one.name), few = one.xs.length < 40;
        series.push({ stroke, dash, width: view.smoothing || tables.length > 6 ? 1 : 1.75, alpha: view.smoothing ? 0.3 : 1, auto: !this.far.includes(one.name), points: { show: few && !view.smoothing, size: 5 } });
        if (view.smoothing) series.push({ stroke, dash, width: 2, auto: !this.far.includes(one.name), points: { show: false } });
      }
      const isBytes = this.key.endsWith("_bytes"), axis = { stroke: soft, font, grid: { stroke: line, width: 1 }, ticks: { show: false }, values: (_, splits) => isBytes ? splits.map((one) => one === null ? "" : bytes(one)) : labels(splits) };
      const isTime = view.axis === "time_s";
      return new uPlot({
        width: Math.max(120, this.plot.clientWidth), height: this.plot.clientHeight || 210, series, legend: { show: false },
        scales: { x: { time: false }, y: view.log ? { distr: 3 } : {} }, padding: [8, 18, 0, 0],
        axes: [{ ...axis, size: 34, space: 64, ...(isTime ? {} : { incrs: WHOLE }), values: (_, splits) => isTime ? splits.map((one) => one === null ? "" : duration(one)) : labels(splits) }, { ...axis, size: 56, space: 34 }],
        cursor: { y: false, drag: { x: true, y: false, setScale: false }, sync: { key: "board" }, points: { size: 6 } },
        hooks: {
          setSelect: [(chart) => { if (chart.select.width > 4) zoomTo([chart.posToVal(chart.select.left, "x"), chart.posToVal(chart.select.left + chart.select.width, "x")]); chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false); }],
          setCursor: [(chart) => this.readAt(chart)],
          draw: [(chart) => { this.mark(chart); const xs = chart.data[0]; this.node.dataset.drawn = xs.length ? String(xs[xs.length - 1]) : ""; }, () => { if (!isPainted) { isPainted = true; document.documentElement.dataset.painted = String(Math.round(performance.now())); } }],
        },
      }, lines, this.plot);
    }
    mark(chart) { // a cross at the lower edge for each NaN
      const context = chart.ctx, bottom = chart.bbox.top + chart.bbox.height, size = 4 * devicePixelRatio;
      context.save(); context.strokeStyle = css("--bad"); context.lineWidth = 2 * devicePixelRatio; context.beginPath();
      for (const one of this.tables ?? []) for (const x of one.marks.slice(0, 2000)) {
        const left = chart.valToPos(x, "x", true), top = bottom - 2 * size;
        if (left < chart.bbox.left || left > chart.bbox.left + chart.bbox.width) continue;
        context.moveTo(left - size, top - size); context.lineTo(left + size, top + size); context.moveTo(left - size, top + size); context.lineTo(left + size, top - size);
      }
      context.stroke(); context.restore();
    }
    readAt(chart) {
      const at = chart.cursor.idx, tables = this.tables ?? [];
      if (at === null || at === undefined || chart.cursor.left < 0) return;
      const x = chart.data[0][at], head = view.axis === "time_s" ? duration(x) : number(Math.round(x * 100) / 100);
      const values = tables.map((one) => { const place = nearest(one.xs, x); return tables.length > 1 ? `${one.name} ${this.show(one.values[place])}` : this.show(one.values[place]); });
      this.read.textContent = `${head} · ${values.slice(0, 3).join(" · ")}`;
    }
    drawTable() {
      if (!this.details.open) return;
      if (this.isDirty || !this.tables) this.tables = tablesOf(this.key); // not drawn yet, out of sight
      const rows = [];
      for (const one of this.tables ?? []) {
        const every = Math.max(1, Math.ceil(one.xs.length / 100));
        one.xs.forEach((x, at) => { if (at % every === 0 || at === one.xs.length - 1) rows.push(h("tr", {}, runs.length > 1 ? cell(one.name) : null, cell(view.axis === "time_s" ? duration(x) : number(x), "n"), cell(one.values[at] === null ? "NaN" : number(one.values[at]), "n"))); });
      }
      const axis = t({ step: "by_step", tokens: "by_tokens", time_s: "by_time" }[view.axis]);
      put(this.tableBox, table(this.key, [...(runs.length > 1 ? [t("run")] : []), { text: axis, cls: "n" }, { text: t("value"), cls: "n" }], rows, { tall: true }));
    }
  }
  const nearest = (sorted, x) => { let low = 0, high = sorted.length - 1; while (low < high) { const middle = (low + high) >> 1; if (sorted[middle] < x) low = middle + 1; else high = middle; } return low > 0 && x - sorted[low - 1] < sorted[low] - x ? low - 1 : low; };
  const formats = new Map();
  const short = (value, digits = 3) => {
    const size = Math.abs(value);
    const notation = size >= 1e4 ? "compact" : size < 1e-3 && size > 0 ? "scientific" : "standard";
    const key = `${notation} ${digits}`;
    if (!formats.has(key)) formats.set(key, new Intl.NumberFormat("en", { notation, maximumSignificantDigits: digits + (notation === "standard" ? 1 : 0) }));
    return formats.get(key).format(value).replace("E", "e");
  };
  const labels = (splits) => { // as few digits as tell them apart
    const known = splits.filter((one) => one !== null && one !== undefined);
    let digits = 2;
    while (digits < 8 && new Set(known.map((one) => short(one, digits))).size < known.length) digits += 1;
    return splits.map((one) => one === null || one === undefined ? "" : short(one, digits));
  };
  const extent = () => { let low = Infinity, high = -Infinity; for (const card of cards.values()) { const xs = card.chart?.data[0]; if (xs?.length) { low = Math.min(low, xs[0]); high = Math.max(high, xs[xs.length - 1]); } } return low < high ? [low, high] : null; };
  const zoomTo = (range) => {
    const began = performance.now();
    view.range = range;
    if (!range) for (const run of runs) delete get("curves", run.name)?.detail;
    for (const card of cards.values()) { if (range && card.isSeen) card.scale(); else if (range) card.isDirty = true; else card.update(); }
    requestAnimationFrame(() => { document.documentElement.dataset.zoomed = String(Math.round((performance.now() - began) * 10) / 10); });
    if (range && IS_LIVE && view.axis === "step") fetchDetail(range);
  };
  const zoomBy = (factor) => { const range = view.range ?? extent(); if (!range) return; const middle = (range[0] + range[1]) / 2, half = (range[1] - range[0]) / 2 * factor, all = extent(); zoomTo(half * 2 >= all[1] - all[0] && !view.range ? null : [middle - half, middle + half]); };
  const shift = (share) => { const range = view.range ?? extent(); if (range) { const by = (range[1] - range[0]) * share; zoomTo([range[0] + by, range[1] + by]); } };
  const updateCurves = () => {
    if (!curveGrid) buildCurves();
    const keys = new Set();
    for (const run of shownRuns()) for (const key of Object.keys(get("curves", run.name)?.series ?? {})) if (!HIDDEN.has(key)) keys.add(key);
    const isGrpo = keys.has("reward"), ofRewards = [...keys].filter((key) => key.startsWith("reward_") && key !== "reward_time_s").sort();
    const first = [...(isGrpo ? ["reward", "eval_reward", ...ofRewards, ...OF_ANSWERS] : []), ...FIRST].filter((key) => keys.has(key)), more = [...keys].filter((key) => !first.includes(key)).sort();
    if (keys.size && axisBox.dataset.keys !== String(keys.size)) { axisBox.dataset.keys = String(keys.size); drawAxis(); }
    bodies.curves.querySelector(".note-place").replaceChildren(...problems("curves"), ...(keys.size ? [] : [empty("no_curves")]));
    bodies.curves.querySelector(".controls").hidden = !keys.size;
    moreFold.hidden = !more.length;
    moreFold.querySelector("summary").textContent = t("more_curves", { n: more.length });
    for (const [key, card] of cards) if (!keys.has(key)) { card.dispose(); cards.delete(key); }
    for (const key of [...first, ...(moreFold.open ? more : [])]) {
      let card = cards.get(key);
      if (!card) {
        card = new Card(key); cards.set(key, card);
        const grid = first.includes(key) ? curveGrid : moreGrid, order = first.includes(key) ? first : more;
        const after = order.slice(order.indexOf(key) + 1).map((one) => cards.get(one)?.node).find((node) => node?.parentNode === grid);
        grid.insertBefore(card.node, after ?? null);
      }
      card.update();
    }
  };
  const drawLegend = () => put(legend, runs.length < 2 ? null : runs.map((run) => h("li", {}, swatch(run.name), h("label", {}, h("input", { type: "checkbox", checked: !hidden.has(run.name), on: { change: (event) => { event.target.checked ? hidden.delete(run.name) : hidden.add(run.name); updateCurves(); } } }), run.name))));

  // ---- ranks
  const KIND = { data: "data", compute: "compute", update: "compute", comm: "comm", evaluate: "evaluate", sample: "evaluate", save: "save", program: "compute", log: "other" };
  const kindOf = (phase) => KIND[phase] ?? "load";
  const kindWord = (kind) => t(kind === "data" ? "data_phase" : kind);
  const drawLane = (canvas, row, from, to) => {
    const [context, width] = canvasOf(canvas, 20), x = (time) => (time - from) / Math.max(1e-6, to - from) * width;
    const colours = Object.fromEntries(["data", "compute", "comm", "evaluate", "save", "load", "other", "short"].map((kind) => [kind, css(`--${kind}`)]));
    const begin = row.spans.length ? row.spans[0][0] : row.seen ?? to;
    context.fillStyle = colours.short;
    if (row.seen) context.fillRect(Math.max(0, x(begin)), 3, Math.max(0, x(row.seen) - Math.max(0, x(begin))), 14);
    const spans = row.since ? [...row.spans, [row.since, Math.max(0, (row.seen ?? row.since) - row.since), row.phase]] : row.spans;
    for (const [start, seconds, phase] of spans) {
      const left = x(start), long = Math.max(0.7, x(start + seconds) - left);
      if (left + long < 0 || left > width) continue;
      const kind = kindOf(phase);
      context.fillStyle = colours[kind];
      context.fillRect(left, 1, long, 18);
      if (long > 6 && (kind === "comm" || kind === "data")) { // also told apart without colours
        context.save(); context.beginPath(); context.rect(left, 1, long, 18); context.clip(); context.strokeStyle = css("--card"); context.globalAlpha = 0.55; context.lineWidth = 1.2; context.beginPath();
        const step = kind === "comm" ? 6 : 4;
        for (let at = Math.max(left, 0) - 20; at < Math.min(left + long, width) + 20; at += step) if (kind === "comm") { context.moveTo(at, 20); context.lineTo(at + 18, 0); } else { context.moveTo(at, 6); context.lineTo(at, 14); }
        context.stroke(); context.restore();
      }
    }
  };
  const drawRanks = () => {
    const region = get("ranks");
    if (!region) return;
    const rows = region.ranks ?? [];
    const timed = rows.filter((row) => row.seen);
    if (!rows.length) { put(bodies.ranks, problems("ranks"), empty("no_ranks")); return; }
    const to = Math.max(...timed.map((row) => row.seen), 0), earliest = Math.min(...timed.map((row) => row.spans.length ? row.spans[0][0] : row.seen));
    const from = view.minutes && timed.length ? Math.max(earliest, to - view.minutes * 60) : earliest;
    const lanes = [];
    const body = rows.map((row) => {
      const total = Object.values(row.seconds).reduce((sum, one) => sum + one, 0), lane = h("canvas", { "aria-hidden": "true" });
      lanes.push([lane, row]);
      const percent = (kind) => total ? Math.round(100 * (row.seconds[kind] ?? 0) / total) : 0;
      const words = ["data", "compute", "comm", "other"].map((kind) => `${kindWord(kind)} ${percent(kind)} %`).join(", ");
      const bars = h("div", { class: "shares", "aria-hidden": "true", title: words }, ["data", "compute", "comm", "other"].map((kind) => { const bar = h("i", { class: `k-${kind}` }); bar.style.flexGrow = String(row.seconds[kind] ?? 0); bar.style.flexBasis = "0"; return bar; }));
      const phase = translated(row).phase ?? "–", now = row.since && row.seen - row.since > 1 ? t("for_s", { phase, time: duration(row.seen - row.since) }) : phase;
      return h("tr", { class: row.culprit ? "culprit" : "", "data-rank": row.rank }, h("th", { scope: "row" }, `${row.rank}${row.culprit ? ` ▲ ${t("culprit")}` : ""}`), cell(row.host ?? "–"), cell(now), cell(number(stepOf(row)), "n at"), cell(lane, "lane"), cell([bars, h("span", { class: "sr" }, words)]));
    });
    put(bodies.ranks, problems("ranks"), timed.length ? null : empty("no_ranks"),
      table(t("ranks"), [t("rank"), t("host"), t("now"), { text: t("step"), cls: "n" }, t("timeline"), t("share")], body, { tall: rows.length > 12, cls: "lanes" }),
      timed.length ? h("p", { class: "soft" }, `${clock.format(from * 1000)} – ${clock.format(to * 1000)} (${duration(to - from)})`) : null,
      h("ul", { class: "keys" }, ["data", "compute", "comm", "evaluate", "save", "load", "other", "short"].map((kind) => h("li", {}, h("i", { class: `k-${kind}`, "aria-hidden": "true" }), kindWord(kind)))));
    if (timed.length) for (const [lane, row] of lanes) drawLane(lane, row, from, to);
  };

  // ---- data, checkpoints, samples, config
  const drawData = () => {
    const region = get("data");
    if (!region) return;
    const sources = [...(region.sources ?? [])];
    if (!sources.length) { put(bodies.data, problems("data"), empty("no_data")); return; }
    const names = ["rows", "used", "cut", "bad"], sum = (value) => typeof value === "object" && value ? Object.values(value).reduce((a, b) => a + b, 0) : value ?? 0;
    const row = (one, name) => h("tr", {}, h("th", { scope: "row", class: "code" }, name), ...names.map((key) => cell(number(one[key]), "n")), cell(number(sum(one.dropped)), "n"), cell(number(one.eval), "n"), cell(number(one.tokens), "n"));
    const reasons = sources.flatMap((one) => Object.entries(one.dropped ?? {}).map(([why, n]) => h("tr", {}, cell(one.path, "code"), cell(why), cell(number(n), "n"))));
    put(bodies.data, problems("data"), table(t("data"), [t("source"), ...names.map((key) => ({ text: t(key), cls: "n" })), { text: t("dropped"), cls: "n" }, { text: t("eval_rows"), cls: "n" }, { text: t("tokens"), cls: "n" }],
      [...sources.map((one) => row(one, one.path)), region.total && sources.length > 1 ? row(region.total, t("total")) : null].filter(Boolean)),
      reasons.length ? table(t("dropped"), [t("source"), t("reason"), { text: t("count"), cls: "n" }], reasons) : null,
      region.rows?.length ? fold("rows", `${t("bad_rows")} (${number(region.rows.length + (region.rows_left_out ?? 0))})`, table(t("bad_rows"), [t("file_line"), t("what"), t("why")], region.rows.map((one) => h("tr", {}, cell(`${one.file}:${one.line}`, "code"), cell(one.what ?? ""), cell(one.why ?? ""))), { tall: true }), region.rows_left_out ? h("p", { class: "soft" }, t("left_out", { n: number(region.rows_left_out) })) : null) : null);
  };
  const drawCheckpoints = () => {
    const region = get("checkpoints");
    if (!region) return;
    const rows = [...(region.checkpoints ?? [])].reverse();
    put(bodies.checkpoints, problems("checkpoints"), rows.length ? table(t("checkpoints"), [{ text: t("step"), cls: "n" }, { text: t("size"), cls: "n" }, t("state"), t("verified"), t("created"), t("host")],
      rows.map((one) => h("tr", {}, h("th", { scope: "row", class: "n" }, number(one.step)), cell(bytes(one.bytes), "n"), cell([h("span", { class: `badge ${one.intact ? "good" : "bad"}` }, t(one.intact ? "intact" : "damaged")), one.foreign ? [" ", h("span", { class: "badge warn" }, t("foreign"))] : null, one.best ? [" ", h("span", { class: "badge" }, `${t("best")} · ${region.best_by}`)] : null]), cell(one.verified_at ? when(one.verified_at) : "–"), cell(one.created ? when(one.created) : "–"), cell(one.holder ?? "–")))) : empty("no_checkpoints"));
  };
  const thumbnails = (names) => names.length ? h("span", { class: "thumbs" }, names.map((name, i) => h("img", { src: get("samples").inline?.[name] ?? `/api/runs/${encodeURIComponent(current)}/pictures/${name}`, alt: t("picture", { n: i + 1 }), loading: "lazy" }))) : null;
  const drawSamples = () => {
    const region = get("samples");
    if (!region) return;
    const all = region.evaluations ?? [];
    const one = (evaluation) => table(t("at_step", { step: number(evaluation.step) }), [t("prompt"), t("reference"), t("answer")], evaluation.samples.map((sample) => h("tr", {}, cell([thumbnails(sample.pictures ?? []), sample.prompt ?? ""], "text"), cell(sample.reference ?? "–", "text"), cell([thumbnails(sample.drawn ?? []), sample.text ?? "", sample.reference !== null && sample.reference === sample.text ? [" ", h("span", { class: "badge good" }, t("equal"))] : null], "text"))));
    put(bodies.samples, problems("samples"), all.length ? [h("h3", {}, t("at_step", { step: number(all[0].step) })), one(all[0]), all.slice(1).map((each) => fold(`s${each.step}`, t("at_step", { step: number(each.step) }), one(each)))] : empty("no_samples"));
  };

  // ---- answers of rollouts
  const chosen = { step: null, group: null, over: false };
  let rolloutBox = null, rolloutTools = null;
  // the step that is shown: asked of the server, or of those that are in the file
  const stepShown = () => {
    const region = get("rollouts");
    if (IS_LIVE || !region?.steps?.length) return region;
    const steps = region.steps, step = steps.find((one) => one.step === chosen.step) ?? steps[steps.length - 1];
    return { ...region, ...step, group: step.details.find((one) => one.key === chosen.group) ?? step.details[0] };
  };
  let over = null, overPending = false;
  const fetchOver = async (row) => {
    if (overPending) return;
    overPending = true;
    const run = current, version = get("rollouts").version;
    try { over = { ...await ask(run, "rollouts", new URLSearchParams({ row })), run, row }; } catch (error) { over = { run, row, version, over: [], left_out: 0, problems: [String(error)] }; }
    overPending = false;
    drawRollouts();
  };
  // the groups of a prompt; null while the first answer of the server is awaited
  const groupsOver = (row) => {
    const region = get("rollouts");
    if (!IS_LIVE) return { over: region.steps.flatMap((one) => one.details).filter((one) => one.row === row), left_out: 0 };
    const isKnown = over?.run === current && over.row === row;
    if (!isKnown || over.version < region.version) fetchOver(row);
    return isKnown ? over : null;
  };
  const choose = async (change) => {
    Object.assign(chosen, change);
    if (IS_LIVE && !("over" in change)) await fetchRegion(current, "rollouts");
    drawRollouts();
  };
  const buildRollouts = () => {
    const steps = () => IS_LIVE ? null : get("rollouts").steps.map((one) => one.step);
    const move = (by) => {
      const region = stepShown(), known = steps();
      if (known) choose({ step: known[Math.max(0, Math.min(known.length - 1, known.indexOf(region.step) + by))], group: null });
      else choose({ step: Math.max(region.first, Math.min(region.last, region.step + by)), group: null });
    };
    let timer = 0;
    const range = h("input", { type: "range", "aria-label": t("step"), on: { input: (event) => {
      const at = Number(event.target.value), step = steps()?.[at] ?? at;
      rolloutTools.label.textContent = t("at_step", { step: number(step) });
      clearTimeout(timer); timer = setTimeout(() => choose({ step, group: null }), IS_LIVE ? 120 : 0);
    } } });
    const label = h("output", {});
    const newest = h("button", { type: "button", class: "plain", on: { click: () => choose({ step: null, group: null }) } }, t("newest"));
    rolloutTools = { range, label, newest, steps };
    rolloutBox = h("div");
    bodies.rollouts.replaceChildren(
      h("div", { class: "controls" },
        choice("answers", t("show"), [["step", t("one_step")], ["over", t("over_steps")]], "step", (value) => choose({ over: value === "over" })),
        h("span", { class: "zoom" }, h("button", { type: "button", "aria-label": t("left"), on: { click: () => move(-1) } }, "←"), range,
          h("button", { type: "button", "aria-label": t("right"), on: { click: () => move(1) } }, "→")), label, newest),
      rolloutBox);
  };
  const percent = (value) => value === null || value === undefined ? "–" : `${precise.format(Math.round(value * 1000) / 10)} %`;
  const bars = (rewards) => {
    const known = rewards.filter((one) => one !== null), low = Math.min(0, ...known), high = Math.max(...known, low + 1e-9);
    return h("span", { class: "bars", "aria-hidden": "true" }, rewards.slice(0, 32).map((one) => {
      const bar = h("i", { class: one === null ? "none" : "" });
      bar.style.height = one === null ? "100%" : `${Math.max(8, 100 * (one - low) / (high - low))}%`;
      return bar;
    }));
  };
  const signed = (value) => value > 0 ? `+${number(value)}` : number(value).replace("-", "−");
  const promptOf = (prompt) => Array.isArray(prompt)
    ? prompt.map((turn) => h("div", { class: "turn" }, h("b", {}, turn.role), h("div", { class: "answer-text" }, turn.content)))
    : h("div", { class: "answer-text" }, prompt ?? "");
  const answerCard = (answer) => h("li", { class: `answer ${answer.reward === null ? "" : answer.advantage > 0 ? "above" : answer.advantage < 0 ? "below" : ""}` },
    h("div", { class: "answer-head" },
      h("span", { class: "soft" }, `#${answer.answer + 1}`), h("strong", {}, answer.reward === null ? t("no_reward") : number(answer.reward)),
      answer.reward === null ? null : h("span", { class: "advantage" }, `${t("advantage")} ${signed(answer.advantage ?? 0)}`)),
    Object.keys(answer.rewards ?? {}).length > 1 ? h("dl", { class: "parts" }, Object.entries(answer.rewards).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, number(value))))) : null,
    h("div", { class: "answer-head" }, h("span", { class: "soft" }, t("n_tokens", { n: number(answer.tokens) })), answer.stop === "length" ? h("span", { class: "badge warn" }, t("cut_at_limit")) : null),
    h("div", { class: "answer-text", tabindex: answer.text.length > 600 ? "0" : null, role: answer.text.length > 600 ? "region" : null, "aria-label": answer.text.length > 600 ? `${t("answer")} ${answer.answer + 1}` : null }, answer.text || h("i", { class: "soft" }, t("empty_answer"))));
  const byReward = (answers) => [...answers].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.answer - b.answer);
  const groupMean = (group) => { const known = group.answers.map((one) => one.reward).filter((one) => one !== null); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null; };
  const groupBadges = (one) => [one.is_equal ? h("span", { class: "badge" }, t("equal_rewards")) : null, one.is_replaced ? h("span", { class: "badge warn" }, t("replaced")) : null];
  const drawPrompts = (region) => [h("h3", {}, `${t("prompts")} (${number(region.groups.length + region.groups_left_out)})`),
    h("ol", { class: "prompts", "data-scroll": "prompts" }, region.groups.map((one) => h("li", {}, h("button", { type: "button", "data-keep": `p${one.key}`, "aria-pressed": String(one.key === region.group?.key), on: { click: () => choose({ step: region.step, group: one.key }) } },
      h("span", { class: "excerpt" }, one.prompt || one.row), h("span", { class: "soft path" }, one.row.split("/").pop()),
      h("span", { class: "mean" }, bars(one.rewards), h("span", {}, h("span", { class: "sr" }, `${t("reward")} `), number(one.mean)), one.truncated ? h("span", { class: "soft" }, t("n_cut", { n: number(one.truncated) })) : null, groupBadges(one)))))),
    region.groups_left_out ? h("p", { class: "soft" }, t("left_out", { n: number(region.groups_left_out) })) : null];
  const drawGroup = (group) => [h("h3", {}, `${t("answers")} (${number(group.answers.length)}) `, groupBadges(group)), h("ol", { class: "answers" }, byReward(group.answers).map(answerCard))];
  const drawOver = (group) => {
    const found = groupsOver(group.row);
    if (!found) return empty("loading");
    return [h("h3", {}, `${t("over_steps")} (${number((found.over ?? []).length + (found.left_out ?? 0))})`), (found.problems ?? []).map((one) => h("p", { class: "note bad", role: "note" }, `${t("problem")}: ${one}`)),
      found.left_out ? h("p", { class: "soft" }, t("left_out", { n: number(found.left_out) })) : null,
      h("div", { class: "columns", tabindex: "0", role: "region", "aria-label": t("over_steps"), "data-scroll": `over ${group.row}` }, (found.over ?? []).map((one) => h("div", { class: one.step === group.step ? "at" : "", "data-step": one.step },
        h("h4", {}, t("at_step", { step: number(one.step) }), h("span", { class: "mean" }, bars(one.answers.map((answer) => answer.reward)), number(groupMean(one))), groupBadges(one)),
        h("ol", { class: "answers" }, byReward(one.answers).map(answerCard)))))];
  };
  const drawRollouts = () => {
    const region = stepShown(), isThere = Boolean(region?.last !== undefined || region?.problems?.length);
    for (const node of [bodies.rollouts.closest("section"), document.querySelector("[data-for=rollouts]")]) node.hidden = !isThere;
    if (!isThere) return;
    if (region.step === undefined) { rolloutTools = null; put(bodies.rollouts, problems("rollouts")); return; }
    if (!rolloutTools) buildRollouts();
    const { range, label, newest, steps } = rolloutTools, known = steps();
    range.min = known ? 0 : region.first; range.max = known ? known.length - 1 : region.last;
    if (document.activeElement !== range) range.value = known ? known.indexOf(region.step) : region.step;
    range.setAttribute("aria-valuetext", t("at_step", { step: number(region.step) }));
    label.textContent = `${t("at_step", { step: number(region.step) })} / ${number(region.last)}`;
    newest.hidden = chosen.step === null;
    const group = region.group, figures = Object.entries(region.figures ?? {}), shares = ["truncated", "equal_groups", "no_reward"];
    put(rolloutBox, problems("rollouts"), known && known.length < region.last - region.first + 1 ? h("p", { class: "soft" }, t("some_steps", { n: number(known.length) })) : null,
      h("dl", { class: "tiles" }, figures.map(([name, value]) => value === null || (name === "no_reward" && !value) ? null
        : h("div", {}, h("dt", {}, WORDS[LANG][name] ?? name.replace(/^reward_/, "")), h("dd", {}, shares.includes(name) ? percent(value) : number(value))))),
      group ? h("div", { class: "rollout" }, h("div", {}, drawPrompts(region)), h("div", { class: "group", "data-group": group.key },
        h("h3", {}, t("prompt"), " ", h("span", { class: "soft path" }, group.row)), h("div", { class: "prompt" }, promptOf(group.prompt)), chosen.over ? drawOver(group) : drawGroup(group))) : empty("no_answers"));
  };
  const text = (value) => value === null || value === undefined ? "null" : typeof value === "string" ? value : Array.isArray(value) ? value.map(text).join(", ") : typeof value === "object" ? JSON.stringify(value) : String(value);
  const drawConfig = () => {
    const region = get("config");
    if (!region) return;
    if (!region.keys?.length) { put(bodies.config, problems("config"), empty("no_config")); return; }
    if (runs.length === 1) {
      const row = (one) => h("tr", {}, h("th", { scope: "row", class: "code" }, one.key), cell(text(one.value), "code"), cell(one.origin ?? t("default"), one.origin ? "code" : "soft"));
      put(bodies.config, problems("config"), table(t("config"), [t("key"), t("value"), t("origin")], region.keys.map(row), { tall: true }));
      return;
    }
    const maps = runs.map((run) => new Map((get("config", run.name)?.keys ?? []).map((one) => [one.key, text(one.value)])));
    const keys = [...new Set(maps.flatMap((one) => [...one.keys()]))];
    const differs = keys.filter((key) => new Set(maps.map((one) => one.get(key))).size > 1), same = keys.filter((key) => !differs.includes(key));
    put(bodies.config, problems("config"), h("h3", {}, t("differs")), table(t("differs"), [t("key"), ...runs.map((run) => run.name)], differs.map((key) => h("tr", {}, h("th", { scope: "row", class: "code" }, key), maps.map((one) => cell(one.get(key) ?? "–", "code"))))),
      fold("same", t("same", { n: same.length }), table(t("same", { n: same.length }), [t("key"), t("value")], same.map((key) => h("tr", {}, h("th", { scope: "row", class: "code" }, key), cell(maps[0].get(key) ?? "–", "code"))), { tall: true })));
  };

  // ---- log
  const wanted = { q: "", rank: "" };
  let rankSelect, timer = 0, found = null;
  const logControls = () => {
    rankSelect = h("select", { "aria-label": t("rank"), on: { change: (event) => { wanted.rank = event.target.value; search(); } } }, h("option", { value: "" }, t("all_ranks")));
    return h("span", { class: "zoom" }, h("input", { type: "search", placeholder: t("search"), "aria-label": `${t("search")}: ${t("log")}`, on: { input: (event) => { wanted.q = event.target.value; clearTimeout(timer); timer = setTimeout(search, 250); } } }), rankSelect);
  };
  const search = async () => {
    if (!wanted.q && !wanted.rank) { found = null; drawLog(); return; }
    if (IS_LIVE) found = await ask(current, "log", new URLSearchParams(wanted));
    else found = { ...get("log"), lines: (get("log")?.lines ?? []).filter((one) => (!wanted.rank || String(one.rank) === wanted.rank) && one.text.toLowerCase().includes(wanted.q.toLowerCase())) };
    drawLog();
  };
  const highlighted = (text) => {
    const at = wanted.q ? text.toLowerCase().indexOf(wanted.q.toLowerCase()) : -1;
    return at < 0 ? text : [text.slice(0, at), h("mark", {}, text.slice(at, at + wanted.q.length)), text.slice(at + wanted.q.length)];
  };
  const drawLog = () => {
    const region = found ?? get("log");
    if (!region) return;
    const known = get("ranks")?.ranks ?? [];
    if (rankSelect && rankSelect.options.length !== known.length + 1) rankSelect.replaceChildren(h("option", { value: "" }, t("all_ranks")), ...known.map((row) => h("option", { value: row.rank, selected: String(row.rank) === wanted.rank }, `rank ${row.rank}`)));
    const old = bodies.log.querySelector(".lines"), atEnd = !old || old.scrollTop + old.clientHeight > old.scrollHeight - 40;
    const list = h("ol", { class: "lines", tabindex: "0", "aria-label": t("log"), "data-scroll": "log" }, (region.lines ?? []).map((one) => h("li", { class: `${one.source} ${one.marked ? "marked" : ""}` },
      h("time", {}, one.time ? clock.format(one.time * 1000) : "--:--:--"), h("b", {}, one.rank === null ? "run" : `rank ${one.rank}${one.host ? ` ${one.host}` : ""}`), h("span", {}, highlighted(one.text)))));
    put(bodies.log, problems("log"), (region.skipped ?? []).map((one) => h("p", { class: "note" }, one)), region.left_out ? h("p", { class: "soft" }, t("earlier_lines")) : null, region.lines?.length ? list : empty("no_log"));
    if (atEnd) list.scrollTop = list.scrollHeight;
  };

  const DRAW = { status: drawStatus, verdict: drawVerdict, curves: updateCurves, ranks: drawRanks, data: drawData, checkpoints: drawCheckpoints, samples: drawSamples, rollouts: drawRollouts, config: drawConfig, log: drawLog };
  const draw = (region) => { if (bodies[region] && (region === "status" || region === "curves" || get(region))) DRAW[region](); };
  const drawAll = () => { drawPicker(); drawLegend(); for (const region of REGIONS) draw(region); };

  // what came in a moment is drawn together: 20 runs answer one after the other
  const due = new Set();
  const drawSoon = (region) => {
    if (!due.size) (document.hidden ? setTimeout : requestAnimationFrame)(() => setTimeout(() => { const now = [...due]; due.clear(); for (const one of now) draw(one); }, runs.length > 3 ? 60 : 0));
    due.add(region);
    if (region === "ranks") due.add("log");
  };

  // ---- live
  const ask = async (run, region, query = "") => {
    const answer = await fetch(`/api/runs/${encodeURIComponent(run)}/${region}${query ? `?${query}` : ""}`, { credentials: "same-origin" });
    if (!answer.ok) throw new Error(String(answer.status));
    return answer.json();
  };
  const pending = new Map();
  const pointsOf = () => Math.max(250, Math.min(2000, Math.floor(5000 / Math.max(1, runs.length))));
  const fetchRegion = async (run, region) => {
    const key = `${run}\u0000${region}`;
    if (pending.has(key)) { pending.set(key, true); return; }
    pending.set(key, false);
    try {
      const old = get(region, run);
      let query = "";
      if (region === "curves") {
        const size = Math.max(0, ...Object.values(old?.series ?? {}).map((one) => one.steps.length));
        const isLong = size > 2 * pointsOf();
        query = new URLSearchParams(old && !isLong ? { points: pointsOf(), since: old.lines, generation: old.generation } : { points: pointsOf() });
      }
      if (region === "rollouts") query = new URLSearchParams(Object.entries({ step: chosen.step, group: chosen.group }).filter(([, one]) => one !== null));
      const value = await ask(run, region, query);
      data[run] ??= {};
      if (region === "curves" && value.appended) {
        for (const [name, more] of Object.entries(value.series)) {
          const series = old.series[name] ??= { steps: [], values: [] };
          series.steps.push(...more.steps); series.values.push(...more.values);
        }
        Object.assign(old, { lines: value.lines, generation: value.generation, version: value.version, problems: value.problems });
      } else data[run][region] = value;
      drawSoon(region);
    } catch (error) { if (!(error instanceof TypeError)) console.warn(region, error); }
    const again = pending.get(key);
    pending.delete(key);
    if (again) fetchRegion(run, region);
  };
  const fetchDetail = (range) => {
    clearTimeout(fetchDetail.timer);
    fetchDetail.timer = setTimeout(async () => {
      for (const run of shownRuns()) {
        try {
          const value = await ask(run.name, "curves", new URLSearchParams({ points: pointsOf(), from: range[0], to: range[1] }));
          if (view.range === range && get("curves", run.name)) get("curves", run.name).detail = value.series;
        } catch { return; }
      }
      if (view.range === range) updateCurves();
    }, 150);
  };
  const wants = (run, region) => run === current || SHARED.has(region) || region === "status";
  const refreshRuns = async () => {
    const answer = await fetch("/api/runs", { credentials: "same-origin" });
    if (!answer.ok) throw new Error(String(answer.status));
    const names = runs.map((one) => one.name).join("\n");
    runs = (await answer.json()).runs;
    current ??= runs.find((one) => one.name === named)?.name ?? runs[0]?.name ?? null;
    if (runs.map((one) => one.name).join("\n") !== names) { drawPicker(); drawLegend(); }
    await Promise.all(runs.flatMap((run) => ["curves", ...REGIONS.filter((one) => one !== "curves")].filter((region) => wants(run.name, region)).map((region) => fetchRegion(run.name, region))));
  };
  let source = null, heard = 0, isLost = false;
  const show = (state) => {
    pill.className = `pill ${state === "live" ? "" : "off"}`;
    pill.textContent = t(state === "live" ? "live" : "connecting");
    banner.textContent = state === "lost" ? t("lost") : "";
    isLost = state === "lost";
    document.documentElement.dataset.connection = state;
  };
  const hear = () => { heard = performance.now(); if (isLost || document.documentElement.dataset.connection !== "live") show("live"); };
  const connect = () => {
    source?.close();
    source = new EventSource("/events");
    source.addEventListener("hello", () => { hear(); refreshRuns().catch(() => {}); });
    source.addEventListener("beat", hear);
    source.addEventListener("change", (event) => {
      hear();
      const changed = JSON.parse(event.data);
      if (Object.keys(changed).some((name) => !runs.some((run) => run.name === name))) { refreshRuns().catch(() => {}); return; }
      for (const [run, regions] of Object.entries(changed)) for (const region of Object.keys(regions)) if (wants(run, region)) fetchRegion(run, region);
    });
  };
  const start = () => {
    build();
    if (!IS_LIVE) { pill.className = "pill file"; pill.textContent = t("file"); drawAll(); }
    else {
      show("connecting"); heard = performance.now(); drawAll(); connect();
      setInterval(() => { if (performance.now() - heard > 4000) { show("lost"); heard = performance.now() - 3000; connect(); } }, 1000);
    }
    isDark.addEventListener("change", () => { drawLegend(); updateCurves(); drawRanks(); });
    let width = innerWidth;
    addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawRanks(); } });
    addEventListener("beforeprint", () => { for (const card of cards.values()) card.update(); });
    addEventListener("hashchange", () => { const place = document.getElementById(location.hash.slice(1)); if (place?.tagName === "DETAILS") place.open = true; });
  };
  start();
})();
