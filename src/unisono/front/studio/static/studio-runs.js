// The runs: their state and curve, and what can be done with each.
import { button, duration, get, h, has, number, post, problemNodes, put, section, t, table } from "./studio-parts.js";

const parts = { list: h("div"), one: h("div"), chartBox: h("div", { class: "plot" }), said: h("div", { "aria-live": "polite" }), confirm: h("div") };
let rows = [], chart = null, drawnFor = "", steps = 0, open = null, go = null;
const TONE = { completed: "good", running: "", queued: "", preempted: "warn", interrupted: "warn", unstarted: "" };
const isBusy = (row) => ["running", "queued"].includes(row.state) || row.start === "running";
const stateOf = (row) => t(row.stopped_by ? `stopped_${row.stopped_by}` : row.start === "running" && row.state !== "running" ? "starting" : row.state);
const badge = (row) => h("span", { class: `badge ${isBusy(row) ? "" : TONE[row.state] ?? "bad"}` }, stateOf(row));
const hasModel = (row) => row.has_result || row.steps?.length > 0;
const stepOf = (row) => row.total_steps ? `${number(row.step ?? 0)} / ${number(row.total_steps)}` : "–";

const steer = async (row, action, more = {}) => {
  put(parts.confirm);
  const answer = await post("steer", { action, name: row.name, ...more });
  put(parts.said, answer.problems ? problemNodes(answer.problems) : h("p", { class: "soft", role: "status" }, t(`did_${answer.state}`)));
  await refresh();
};
const askFirst = (text, name, call) => {
  put(parts.confirm, h("div", { class: "note" }, h("p", {}, text), h("div", { class: "actions" }, button(name, call, { "data-keep": "sure" }), button("no", () => put(parts.confirm)))));
  parts.confirm.querySelector("button").focus();
};
const askDuration = (row) => {
  const input = h("input", { type: "text", id: "new-duration", value: row.duration ?? "", "data-keep": "duration" });
  put(parts.confirm, h("form", { class: "note", on: { submit: (event) => { event.preventDefault(); steer(row, "extend", { duration: input.value }); } } },
    h("label", { for: "new-duration" }, t("new_duration")), input, h("div", { class: "actions" }, h("button", { type: "submit" }, t("extend")), button("no", () => put(parts.confirm)))));
  input.focus();
};
const buttonsOf = (row) => [
  row.state === "queued" ? button("cancel", () => steer(row, "cancel", { id: row.start_id })) : null,
  row.is_run && isBusy(row) && row.state !== "queued" ? button("stop", () => steer(row, "stop")) : null,
  row.has_config && !isBusy(row) && row.state !== "completed" ? button("resume_run", () => steer(row, "resume")) : null,
  row.has_config && !isBusy(row) && row.state === "completed" ? button("extend", () => askDuration(row)) : null,
  row.has_config && !isBusy(row) ? button("fresh_run", () => askFirst(t("fresh_help"), "fresh_run", () => steer(row, "fresh"))) : null,
  hasModel(row) && !isBusy(row) ? button("chat", () => go("chat", row.name), { class: "main" }) : null,
  hasModel(row) && !isBusy(row) ? button("take_away", () => go("results", row.name)) : null,
];
const tile = (name, value) => h("div", {}, h("dt", {}, t(name)), h("dd", {}, value));
const showOne = () => {
  const row = rows.find((one) => one.name === open) ?? rows[0];
  if (!row) { put(parts.one, h("p", { class: "empty" }, t("no_runs"))); parts.chartBox.hidden = true; return; }
  parts.chartBox.hidden = !row.is_run;
  document.documentElement.dataset.run = `${row.name} ${row.state}`;
  put(parts.one, h("div", { class: "state" }, h("strong", {}, row.name), badge(row)), h("p", { class: "path" }, row.path), problemNodes(row.problems),
    row.total_steps ? h("progress", { max: row.total_steps, value: Math.min(row.step ?? 0, row.total_steps), "aria-label": stepOf(row) }) : null,
    row.is_run ? h("dl", { class: "tiles" }, tile("step", stepOf(row)), tile("loss", number(row.loss)), row.eval_loss === null ? null : tile("eval_loss", number(row.eval_loss)), tile("time_left", duration(row.seconds_left)), tile("elapsed", duration(row.wall_time_s)), row.model ? tile("model", row.model) : null) : null,
    h("div", { class: "actions" }, buttonsOf(row), row.is_run ? h("a", { href: `/board?run=${encodeURIComponent(row.name)}`, "data-keep": "board" }, t("on_board")) : null));
  if (row.is_run) draw(row);
};
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const draw = async (row) => {
  if (drawnFor === row.name && steps === row.step && chart) return;
  let curves;
  try { curves = await get(`/api/runs/${encodeURIComponent(row.name)}/curves?points=400`); } catch { return; }
  const series = curves.series?.loss, evaluated = curves.series?.eval_loss;
  if (!series?.steps.length) { chart?.destroy(); chart = null; return; }
  drawnFor = row.name; steps = row.step;
  const loss = [series.steps, series.values], data = evaluated ? uPlot.join([loss, [evaluated.steps, evaluated.values]]) : loss;
  const axis = { stroke: css("--soft"), grid: { stroke: css("--line") }, ticks: { show: false } };
  const lines = [{}, { label: "loss", stroke: css("--accent"), width: 2, points: { show: series.steps.length < 40 } }, ...(evaluated ? [{ label: "eval_loss", stroke: css("--warn"), width: 2, dash: [6, 4], points: { show: true }, spanGaps: true }] : [])];
  chart?.destroy();
  chart = new uPlot({ width: Math.max(200, parts.chartBox.clientWidth), height: 210, series: lines, legend: { show: false }, scales: { x: { time: false } }, axes: [axis, { ...axis, size: 56 }] }, data, parts.chartBox);
  parts.chartBox.setAttribute("aria-label", t("curve_of", { key: evaluated ? "loss, eval_loss" : "loss", axis: t("by_step"), n: number(series.steps.length), first: number(series.values[0]), last: number(series.values[series.values.length - 1]) }));
  parts.chartBox.dataset.drawn = String(series.steps[series.steps.length - 1]);
};
const showList = () => put(parts.list, !rows.length ? h("p", { class: "empty" }, t("no_runs")) : table(t("runs"), [t("run"), t("state"), t("step"), t("loss")], rows.map((row) => h("tr", { "aria-current": row.name === open ? "true" : null },
  h("th", { scope: "row" }, h("button", { type: "button", class: "plain", "data-keep": `run ${row.name}`, on: { click: () => go("runs", row.name) } }, row.name)), h("td", {}, badge(row)), h("td", { class: "n" }, stepOf(row)), h("td", { class: "n" }, number(row.loss))))));

let latest = { runs: [], tasks: [], models: [] };
const listeners = new Set();
export const known = () => latest;
export const listen = (call) => listeners.add(call);
export const refresh = async () => {
  try { latest = await get("/api/studio/runs"); } catch { document.documentElement.dataset.connection = "lost"; return; }
  document.documentElement.dataset.connection = "live";
  rows = latest.runs;
  if (!document.getElementById("v-runs").hidden) { showList(); showOne(); }
  for (const call of listeners) call(latest);
};
export const openRun = (name) => { if (name !== open) { put(parts.said); put(parts.confirm); } open = name || open; refresh(); };
export const buildRuns = (call) => {
  go = call;
  parts.chartBox.setAttribute("role", "img");
  parts.chartBox.setAttribute("aria-label", t("loss"));
  return [section("run", parts.said, parts.confirm, parts.one, parts.chartBox), section("runs", parts.list)];
};
// ---- choosing a model: the result of a run, or one of its checkpoints
const choices = () => rows.filter(hasModel).map((row) => h("optgroup", { label: row.name }, row.has_result ? h("option", { value: row.name }, row.name) : null,
  row.steps.map((step) => h("option", { value: `${row.name}\n${step}` }, t("at_checkpoint", { name: row.name, step: number(step) })))));
// fills a select if there is something new, and keeps what is chosen
export const fillModels = (select, ...before) => {
  const state = JSON.stringify(rows.filter(hasModel).map((row) => [row.name, row.has_result, row.steps]));
  if (select.dataset.of === state) return;
  const value = select.value;
  select.dataset.of = state;
  put(select, before.map((one) => one.cloneNode(true)), choices());
  pickModel(select, value);
};
export const pickModel = (select, name) => {
  const option = [...select.options].find((one) => one.value === name) ?? [...select.options].find((one) => name && one.value.startsWith(`${name}\n`));
  if (option) select.value = option.value;
  return Boolean(option);
};
// as requests name it
export const modelIn = (select) => { const [name, step] = select.value.split("\n"); return step ? { name, step: Number(step) } : { name }; };
