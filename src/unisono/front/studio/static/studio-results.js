// Exports and evaluations of results, and the cause of a failure in a pasted log.
import { LANG, button, chooseFile, field, get, h, has, number, owner, post, problemNodes, put, section, t, table } from "./studio-parts.js";
import { fillModels, listen, modelIn, pickModel } from "./studio-runs.js";

const parts = {};
const FORMS = ["adapter", "merged", "gguf", "gguf-adapter", "kohya", "diffusers"], QUANTIZED = ["f16", "bf16", "f32", "q8_0", "q6_k", "q5_k_m", "q4_k_m"];
const FIGURES = ["rows", "loss", "perplexity", "exact_match", "rouge_l", "bleu"];
let shown = "", awaited = "", pick = "";
const start = async (action, body) => {
  const answer = await post(action, { ...modelIn(parts.run), ...body });
  put(parts.said, problemNodes(answer.problems?.length ? answer.problems : []));
  return answer;
};
const figures = (answer) => FIGURES.filter((name) => typeof answer[name] === "number").map((name) => `${has(name) ? t(name) : name} ${number(answer[name])}`).join(" · ");
const outcome = (task) => task.kind === "evaluate" ? figures(task.answer) : task.kind === "push" ? t("pushed", { repo: task.answer.repo, commit: String(task.answer.commit).slice(0, 12) }) : null;
const toolsOf = (task) => {
  if (["running", "queued"].includes(task.state)) return button("stop", () => post("stop-task", { id: task.id }), { "data-keep": `stop ${task.id}` });
  if (task.state !== "done" || !task.out) return null;
  return [h("a", { href: `/api/studio/downloads/${task.id}`, download: "", "data-keep": `download ${task.id}` }, t("download")), " ",
    task.kind === "export" ? null : button("show_answers", () => showAnswers(task.group || task.id), { class: "plain", "data-keep": `answers ${task.id}` })];
};
const taskRow = (task) => h("tr", { "data-task": task.id, "data-kind": task.kind, "data-state": task.state }, h("th", { scope: "row" }, `${t(`task_${task.kind}`)} · ${task.run}`), h("td", {}, h("span", { class: `badge ${{ done: "good", failed: "bad" }[task.state] ?? ""}` }, t(`task_${task.state}`))),
  h("td", {}, task.state === "failed" ? problemNodes(task.problems) : task.state === "done" ? outcome(task) : task.said, h("div", { class: "path" }, task.command)), h("td", {}, toolsOf(task)));
const update = (latest) => {
  if (document.getElementById("v-results").hidden) return;
  fill();
  const compared = latest.tasks.filter((one) => one.group === awaited);
  if (awaited && compared.length && compared.every((one) => ["done", "failed"].includes(one.state))) { showAnswers(awaited); awaited = ""; }
  put(parts.tasks, latest.tasks.length ? table(t("tasks"), [t("task"), t("state"), t("now"), t("file")], [...latest.tasks].reverse().map(taskRow)) : h("p", { class: "empty" }, t("no_tasks")));
};
const fill = () => {
  fillModels(parts.run);
  fillModels(parts.beside, h("option", { value: "*base" }, t("base_model")));
  if (pick && pickModel(parts.run, pick)) pick = "";
};
// the answers of a comparison, side by side
const showAnswers = async (group) => {
  let value;
  try { value = await get(`/api/studio/answers?group=${encodeURIComponent(group)}`); } catch (error) { put(parts.answers, problemNodes(error.problems)); return; }
  shown = group;
  const hasReference = value.rows.some((row) => row.reference !== null);
  put(parts.answers, h("h3", { class: "sub" }, t("answers_title")), table(t("answers_title"), [t("prompt"), ...(hasReference ? [t("reference")] : []), ...value.columns], value.rows.map((row) => h("tr", {}, [row.prompt, ...(hasReference ? [row.reference] : []), ...row.answers].map((one) => h("td", { class: "text" }, one ?? "–"))))));
  parts.answers.dataset.group = shown;
};
const compare = async () => {
  const beside = parts.beside.value === "*base" ? { name: modelIn(parts.run).name, base: true } : modelIn(parts.beside);
  const answer = await start("compare", { sides: [modelIn(parts.run), beside], data: parts.prompts.value });
  if (answer.group) awaited = answer.group;
};
const push = async () => {
  await start("push", { repo: parts.repo.value, token: parts.token.value, private: parts.isPrivate.checked, merge: parts.isMerged.checked });
  parts.token.value = "";
};
export const openResults = (name) => { if (name) pick = name; fill(); };
const fileField = (name, input) => {
  const node = field(name, input);
  node.append(h("div", { class: "row" }, input, button("browse", () => chooseFile((path) => { input.value = path; }), { "data-keep": `browse ${name}` })));
  return node;
};
const textInput = (props = {}) => h("input", { type: "text", autocomplete: "off", spellcheck: false, ...props });
const pushPart = () => {
  parts.repo = textInput({ placeholder: "OWNER/NAME" }); parts.token = h("input", { type: "password", autocomplete: "off", class: "secret" });
  parts.isPrivate = h("input", { type: "checkbox", checked: true }); parts.isMerged = h("input", { type: "checkbox" });
  return [h("h3", { class: "sub" }, t("push_title")), h("p", { class: "soft" }, t("push_help")), h("div", { class: "grid-fields" }, field("push_repo", parts.repo), field("push_token", parts.token)),
    h("div", { class: "actions" }, h("label", {}, parts.isPrivate, t("push_private")), h("label", {}, parts.isMerged, t("export_merged")), button("push", push))];
};
export const buildResults = () => {
  parts.run = h("select", {}); parts.what = h("select", { on: { change: () => { quantized.hidden = parts.what.value !== "gguf"; } } }, FORMS.map((name) => h("option", { value: name }, t(`export_${name}`))));
  parts.quantize = h("select", {}, QUANTIZED.map((name) => h("option", { value: name }, name)));
  parts.data = textInput(); parts.prompts = textInput(); parts.beside = h("select", {});
  parts.tasks = h("div"); parts.said = h("div", { "aria-live": "polite" }); parts.answers = h("div", { "aria-live": "polite" });
  const quantized = field("quantization", parts.quantize);
  quantized.hidden = true;
  listen(update);
  return [section("results", field("model_of_run", parts.run), parts.said, h("h3", { class: "sub" }, t("take_away")), h("div", { class: "grid-fields" }, field("export_form", parts.what), quantized), h("div", { class: "actions" }, button("export", () => start("export", { what: parts.what.value, quantize: parts.what.value === "gguf" ? parts.quantize.value : "" }), { class: "main" })),
    owner.may_push ? pushPart() : null,
    h("h3", { class: "sub" }, t("evaluate_title")), fileField("evaluate_data", parts.data), h("div", { class: "actions" }, button("evaluate", () => start("evaluate", { data: parts.data.value }))),
    h("h3", { class: "sub" }, t("compare_title")), h("div", { class: "grid-fields" }, fileField("compare_prompts", parts.prompts), field("compare_beside", parts.beside)), h("div", { class: "actions" }, button("compare", compare))),
  section("tasks", parts.tasks, parts.answers)];
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
