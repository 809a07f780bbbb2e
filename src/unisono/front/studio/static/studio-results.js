// Exports and evaluations of results, and the cause of a failure in a pasted log.
import { LANG, button, chooseFile, field, h, has, number, post, problemNodes, put, section, t, table } from "./studio-parts.js";
import { listen, optionsOf, withResult } from "./studio-runs.js";

const parts = {};
const FORMS = ["adapter", "merged", "gguf", "gguf-adapter", "kohya", "diffusers"], QUANTIZED = ["f16", "bf16", "f32", "q8_0", "q6_k", "q5_k_m", "q4_k_m"];
let names = "";
const start = async (action, body) => { const answer = await post(action, { name: parts.run.value, ...body }); put(parts.said, problemNodes(answer.problems?.length ? answer.problems : [])); };
const figures = (answer) => ["rows", "loss", "perplexity", "exact_match", "rouge_l", "bleu"].filter((name) => typeof answer[name] === "number").map((name) => `${has(name) ? t(name) : name} ${number(answer[name])}`).join(" · ");
const taskRow = (task) => h("tr", { "data-task": task.id, "data-state": task.state }, h("th", { scope: "row" }, `${t(`task_${task.kind}`)} · ${task.run}`), h("td", {}, h("span", { class: `badge ${{ done: "good", failed: "bad" }[task.state] ?? ""}` }, t(`task_${task.state}`))),
  h("td", {}, task.state === "failed" ? problemNodes(task.problems) : task.state === "done" ? (task.kind === "evaluate" ? figures(task.answer) : h("span", { class: "path" }, task.out)) : task.said, h("div", { class: "path" }, task.command)),
  h("td", {}, task.state === "done" && task.out ? h("a", { href: `/api/studio/downloads/${task.id}`, download: "", "data-keep": `download ${task.id}` }, t("download")) : ["running"].includes(task.state) ? button("stop", () => post("stop-task", { id: task.id }), { "data-keep": `stop ${task.id}` }) : null));
const update = (latest) => {
  if (document.getElementById("v-results").hidden) return;
  fillNames();
  put(parts.tasks, latest.tasks.length ? table(t("tasks"), [t("task"), t("state"), t("now"), t("file")], [...latest.tasks].reverse().map(taskRow)) : h("p", { class: "empty" }, t("no_tasks")));
};
const fillNames = () => {
  const list = withResult(), now = list.map((row) => row.name).join("\n"), run = parts.run.value;
  if (now === names) return;
  names = now;
  put(parts.run, optionsOf(list));
  if (run) parts.run.value = run;
};
export const openResults = (name) => { fillNames(); if (name) parts.run.value = name; };
export const buildResults = () => {
  parts.run = h("select", {}); parts.what = h("select", { on: { change: () => { quantized.hidden = parts.what.value !== "gguf"; } } }, FORMS.map((name) => h("option", { value: name }, t(`export_${name}`))));
  parts.quantize = h("select", {}, QUANTIZED.map((name) => h("option", { value: name }, name)));
  parts.data = h("input", { type: "text", autocomplete: "off", spellcheck: false }); parts.tasks = h("div"); parts.said = h("div", { "aria-live": "polite" });
  const quantized = field("quantization", parts.quantize);
  quantized.hidden = true;
  listen(update);
  return [section("results", field("result_of", parts.run), parts.said, h("h3", { class: "sub" }, t("take_away")), h("div", { class: "grid-fields" }, field("export_form", parts.what), quantized), h("div", { class: "actions" }, button("export", () => start("export", { what: parts.what.value, quantize: parts.what.value === "gguf" ? parts.quantize.value : "" }), { class: "main" })),
    h("h3", { class: "sub" }, t("evaluate_title")), field("evaluate_data", parts.data), h("div", { class: "actions" }, button("browse", () => chooseFile((path) => { parts.data.value = path; })), button("evaluate", () => start("evaluate", { data: parts.data.value })))),
  section("tasks", parts.tasks)];
};

// ---- a failure
const drawVerdict = (verdict) => {
  const one = LANG === "zh" ? { ...verdict, ...verdict.chinese } : verdict, explain = one.explain;
  return h("div", { class: `block ${verdict.severity ?? ""}`, "data-cause": verdict.cause }, h("dl", {}, one.lines.map(([label, text], at) => [h("dt", {}, t(label)), h("dd", { class: `${at === 0 ? "first" : ""} ${label === "EVIDENCE" ? "code" : ""}` }, text)])),
    explain ? h("details", {}, h("summary", {}, `${explain.id}: ${explain.title}`), h("div", { class: "explain" }, h("p", {}, explain.meaning), h("h3", {}, t("signs")), h("ul", {}, explain.signs.map((line) => h("li", {}, line))), h("h3", {}, t("fix")), h("ol", {}, explain.fix.map((line) => h("li", {}, line))))) : null);
};
export const buildDiagnose = () => {
  const text = h("textarea", { id: "log", rows: "12", spellcheck: false, on: { dragover: (event) => event.preventDefault(), drop: (event) => { const file = event.dataTransfer.files[0]; if (file) { event.preventDefault(); file.text().then((value) => { text.value = value; }); } } } });
  const answer = h("div", { "aria-live": "polite" }), file = h("input", { type: "file", on: { change: async (event) => { text.value = await event.target.files[0].text(); } } });
  const run = async () => {
    put(answer, h("p", { class: "soft" }, t("diagnosing")));
    const value = await post("diagnose", { text: text.value });
    put(answer, value.verdict ? drawVerdict(value.verdict) : problemNodes(value.problems));
  };
  return section("diagnose", h("p", { class: "soft" }, t("diagnose_help")), field("log_text", text), field("log_file", file), h("div", { class: "actions" }, button("find_cause", run, { class: "main" })), answer);
};
