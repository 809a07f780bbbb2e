// A new run: the form of the schema, the YAML beside it, the rows and the plan before anything starts.
import { LANG, button, bytes, chooseFile, field, get, h, has, inBoth, inLanguage, number, owner, post, problemNode, problemNodes, put, section, t, table, upload } from "./studio-parts.js";

let form = null, draft = { values: {}, text: "", problems: [], notes: [], method: "lora" };
let pending = {}, asking = null, pressed = false, planTimer = 0, asks = 0, onStarted = null, nextText = null;
const touched = new Set(), inputs = new Map(), errors = new Map(), texts = new Map();
const byKey = new Map();
const parts = {};
const label = (key) => has(`f_${key}`) ? t(`f_${key}`) : key;

export const fill = (text) => { nextText = text; pending = {}; pressed = false; send(); };

const shownDefault = (one) => one.default === null || one.default === undefined ? "" : typeof one.default === "object" ? JSON.stringify(one.default) : String(one.default);
const makeInput = (one) => {
  const change = (event) => set(one.key, event.target.value);
  if (one.kind === "switch" || one.kind === "choice") {
    const options = one.kind === "switch" ? ["true", "false"] : one.choices;
    return h("select", { on: { change } }, h("option", { value: "" }, t("default_is", { value: shownDefault(one) || "null" })), options.map((word) => h("option", { value: word }, word)));
  }
  const input = h("input", { type: "text", placeholder: shownDefault(one), autocomplete: "off", spellcheck: false, inputmode: one.kind === "number" ? "decimal" : null, on: { input: change } });
  if (one.choices.length || one.key === "model.path") input.setAttribute("list", one.key === "model.path" ? "models" : `l-${one.key}`);
  return input;
};
const makeField = (one, prefix = "f", ...more) => {
  const input = makeInput(one), id = `${prefix}-${one.key}`, error = h("div", { class: "error", id: `e-${id}` });
  input.id = id; input.dataset.key = one.key; input.setAttribute("aria-describedby", `d-${id} e-${id}`);
  inputs.set(one.key, [...(inputs.get(one.key) ?? []), input]);
  errors.set(one.key, [...(errors.get(one.key) ?? []), error]);
  return h("div", { class: "field", "data-field": one.key }, h("label", { for: id }, label(one.key), has(`f_${one.key}`) ? [" ", h("code", {}, one.key)] : null), h("div", { class: "row" }, input, more),
    one.choices.length && input.tagName === "INPUT" && one.key !== "model.path" ? h("datalist", { id: `l-${one.key}` }, one.choices.map((word) => h("option", { value: word }))) : null,
    h("div", { class: "help", id: `d-${id}` }, one.help[LANG]), error);
};

// ---- both ways: a change of the form goes over the YAML, a change of the YAML into the form
const set = (key, value) => { touched.add(key); pending[key] = value; send(); };
const launcher = () => parts.launcher?.value ?? "";
const send = () => { asking ??= sendAll().finally(() => { asking = null; }); return asking; };
const sendAll = async () => {
  while (Object.keys(pending).length || nextText !== null) {
    const changes = pending, text = nextText ?? draft.text;
    pending = {}; nextText = null;
    const answer = await post("draft", { text, changes, launcher: launcher() });
    if (answer.text === undefined) { put(parts.above, problemNodes(answer.problems)); continue; }
    draft = answer;
    show();
  }
};
const isBroken = () => Boolean(draft.text.trim()) && !Object.keys(draft.values).length;
const isMissing = (problem) => /is missing$/.test(problem.what.en);
const show = () => {
  for (const [key, list] of inputs) for (const input of list) {
    input.disabled = isBroken();
    if (input !== document.activeElement) input.value = draft.values[key] ?? "";
    input.removeAttribute("aria-invalid");
  }
  for (const list of errors.values()) for (const node of list) node.replaceChildren();
  const above = [];
  for (const problem of draft.problems) {
    if (isMissing(problem) && !pressed && !touched.has(problem.key)) continue;
    const nodes = errors.get(problem.key);
    if (!nodes) { above.push(problemNode(problem)); continue; }
    for (const node of nodes) node.append(h("div", {}, inLanguage(problem.what), inLanguage(problem.why) ? `: ${inLanguage(problem.why)}` : "", inLanguage(problem.fix) ? h("div", {}, inLanguage(problem.fix)) : null));
    for (const input of inputs.get(problem.key)) input.setAttribute("aria-invalid", "true");
  }
  put(parts.above, above, draft.notes.map((note) => h("p", { class: "note" }, inLanguage(note))));
  if (document.activeElement !== parts.yaml || draft.notes.length) parts.yaml.value = draft.text; // a translation takes the place of what was pasted
  parts.command.textContent = draft.command ?? "";
  parts.objective.value = draft.values.objective ?? "sft";
  for (const radio of parts.methods.querySelectorAll("input")) radio.checked = radio.value === draft.method;
  for (const node of parts.more.children) node.hidden = !(form.first_of[parts.objective.value] ?? []).includes(node.dataset.field);
  document.documentElement.dataset.drafted = String(Math.round(performance.now()));
  clearTimeout(planTimer);
  asks += 1;
  if (!draft.problems.length && draft.text.trim()) { planTimer = setTimeout(plan, 900); parts.plan.dataset.state = "waiting"; } else { parts.plan.dataset.state = "none"; put(parts.plan, h("p", { class: "empty" }, t("no_plan"))); }
};

// ---- the plan and the rows
const tile = (name, value) => h("div", {}, h("dt", {}, t(name)), h("dd", {}, value));
const plan = async () => {
  const ask = asks;
  put(parts.plan, h("p", { class: "soft" }, t("planning")));
  const answer = await post("plan", { text: draft.text, launcher: launcher() });
  if (ask !== asks) return;
  parts.plan.dataset.state = "shown";
  if (answer.problems.length) { put(parts.plan, problemNodes(answer.problems)); return; }
  if (answer.script) { put(parts.plan, h("p", { class: "soft" }, t("plan_script")), h("pre", { class: "command" }, answer.script)); return; }
  const share = answer.device_bytes ? answer.memory_bytes / answer.device_bytes : null;
  put(parts.plan, answer.warnings.map((text) => h("p", { class: "note" }, inLanguage(text))), h("dl", { class: "tiles" },
    tile("plan_steps", number(answer.steps)), tile("plan_rows", number(answer.rows)), tile("tokens", number(answer.tokens)), tile("plan_batch", `${number(answer.global_batch)} (${number(answer.micro_batch)})`),
    tile("plan_memory", bytes(answer.memory_bytes) + (share === null ? "" : ` · ${Math.round(100 * share)} %`)), tile("plan_device", `${answer.world_size} × ${answer.device}`), tile("plan_dtype", answer.dtype)));
};
const preview = async () => {
  await send();
  pressed = true; show();
  put(parts.rows, h("p", { class: "soft" }, t("reading_rows")));
  const answer = await post("preview", { text: draft.text });
  if (answer.problems.length) { put(parts.rows, problemNodes(answer.problems)); return; }
  const sides = (row) => row.chosen ? [row.chosen, row.rejected] : row.runs ? [row] : [];
  put(parts.rows, h("p", { class: "soft" }, h("mark", { class: "loss" }, t("loss_text")), " ", t("loss_legend")),
    answer.rows.map((row) => sides(row).map((side) => h("figure", { class: "shown-row" }, h("figcaption", { class: "soft" }, `${row.row} · ${t("n_tokens", { n: number(side.tokens) })}`),
      h("pre", { tabindex: "0", role: "region", "aria-label": row.row }, side.runs.map((run) => run.loss ? h("mark", { class: "loss" }, run.text) : run.text))))),
    answer.notes.map((note) => h("p", { class: "note" }, typeof note === "string" ? note : JSON.stringify(note))),
    table(t("ledger"), [t("source"), t("rows"), t("used"), t("cut"), t("dropped"), t("bad"), t("tokens")], answer.ledger.sources.map((one) => h("tr", {}, h("th", { scope: "row", class: "code" }, one.path),
      [one.rows, one.used, one.cut, Object.values(one.dropped ?? {}).reduce((a, b) => a + b, 0), one.bad, one.tokens].map((value) => h("td", { class: "n" }, number(value)))))));
};

const start = async (event) => {
  event?.preventDefault();
  await send();
  pressed = true; show();
  if (draft.problems.length) { [...document.querySelectorAll("[aria-invalid=true]")][0]?.focus(); return; }
  parts.start.disabled = true;
  clearTimeout(planTimer);
  const answer = await post("start", { text: draft.text, launcher: launcher() });
  parts.start.disabled = false;
  if (answer.problems) { put(parts.below, problemNodes(answer.problems)); return; }
  put(parts.below);
  onStarted(answer.name);
  suggest(true);
};

// ---- what is offered before anything is typed
const suggest = async (isNext) => {
  const offered = await get("/api/studio/suggestions");
  put(parts.models, offered.models.map((name) => h("option", { value: name })));
  put(parts.offers, offered.models.slice(0, 4).map((name) => h("button", { type: "button", class: "offer", "data-keep": `offer ${name}`, on: { click: () => set("model.path", name) } }, name)));
  if (isNext || !draft.values.output_dir) { pending.output_dir = offered.output_dir; send(); }
};
const takeUpload = async (file) => {
  if (!file) return;
  put(parts.uploading, h("span", { class: "soft", role: "status" }, t("uploading", { name: file.name })));
  const answer = await upload(file);
  if (answer.problems) { put(parts.uploading, problemNodes(answer.problems)); return; }
  put(parts.uploading);
  set("data.train", answer.path);
};
const save = () => {
  const link = h("a", { href: URL.createObjectURL(new Blob([draft.text], { type: "text/yaml" })), download: "train.yaml" });
  link.click();
  URL.revokeObjectURL(link.href);
};

const openFile = h("input", { type: "file", accept: ".yaml,.yml,.json", hidden: true, on: { change: async (event) => { nextText = await event.target.files[0].text(); event.target.value = ""; touched.clear(); send(); } } });

const dataField = (one) => {
  const file = h("input", { type: "file", hidden: true, on: { change: (event) => { takeUpload(event.target.files[0]); event.target.value = ""; } } });
  parts.uploading = h("div");
  return [makeField(one, "f", button("browse", () => chooseFile((path) => set("data.train", path))), button("upload", () => file.click()), file), parts.uploading];
};
const modelField = (one) => {
  parts.models = h("datalist", { id: "models" }); parts.offers = h("div", { class: "offers", role: "group", "aria-label": t("offers") });
  return [makeField(one), parts.models, parts.offers];
};
const methodFields = () => {
  parts.methods = h("fieldset", {}, h("legend", {}, t("method")), form.methods.map((name) => h("label", {}, h("input", { type: "radio", name: "method", value: name, checked: name === "lora", on: { change: () => set("method", name) } }), t(`method_${name}`))));
  parts.objective = h("select", { id: "objective", on: { change: (event) => set("objective", event.target.value) } }, byKey.get("objective").choices.map((name) => h("option", { value: name }, has(`objective_${name}`) ? t(`objective_${name}`) : name)));
  return [field("objective", parts.objective), parts.methods];
};
// the owner's launchers: a change asks for the command and the plan again
const launcherField = () => {
  if (!owner.launchers.length) return null;
  parts.launcher = h("select", { id: "launcher", on: { change: () => { nextText = draft.text; send(); } } }, h("option", { value: "" }, t("this_machine")), owner.launchers.map((name) => h("option", { value: name }, name)));
  return field("launcher", parts.launcher);
};
const plainText = (text) => text.toLowerCase().replace(/[-_.]+/g, " ");
const allFields = () => {
  const box = h("div"), shown = [];
  const search = h("input", { type: "search", id: "search", placeholder: t("search_settings"), "aria-label": t("search_settings"), on: { input: () => filter() } });
  const filter = () => { const words = plainText(search.value).split(/\s+/); for (const [node, text] of shown) node.hidden = !words.every((word) => text.includes(word)); };
  const build = () => {
    if (shown.length) return;
    for (const one of form.fields) {
      const node = makeField(one, "a");
      shown.push([node, plainText(`${one.key} ${one.names.join(" ")} ${inBoth(`f_${one.key}`)} ${one.help.en} ${one.help.zh}`)]);
      box.append(node);
    }
    filter();  // something may have been typed before `toggle` arrives
    show();
  };
  return h("details", { on: { toggle: build } }, h("summary", {}, t("all_settings", { n: form.fields.length })), h("div", { class: "inner" }, search, box));
};

export const buildStart = async (call) => {
  onStarted = call;
  form = await get("/api/studio/form");
  for (const one of form.fields) byKey.set(one.key, one);
  parts.above = h("div"); parts.below = h("div", { "aria-live": "polite" });
  parts.yaml = h("textarea", { id: "yaml", rows: "16", spellcheck: false, "aria-label": "YAML", on: { input: (event) => { nextText = event.target.value; touched.clear(); send(); } } });
  parts.command = h("code", { class: "command" }); parts.plan = h("div", { "aria-live": "polite", id: "plan" }, h("p", { class: "empty" }, t("no_plan"))); parts.rows = h("div", { "aria-live": "polite", id: "rows" });
  parts.start = h("button", { type: "submit", class: "main" }, t("start_run"));
  const keys = form.first.filter((key) => !["model.path", "data.train"].includes(key));
  const more = [...new Set(Object.values(form.first_of).flat())];
  parts.more = h("div", { class: "grid-fields" }, more.map((key) => makeField(byKey.get(key), "o")));
  const left = h("form", { on: { submit: start } }, section("new_run", parts.above, modelField(byKey.get("model.path")), dataField(byKey.get("data.train")), methodFields(), parts.more,
    h("div", { class: "grid-fields" }, keys.map((key) => makeField(byKey.get(key)))), launcherField(), allFields(), h("div", { class: "actions" }, parts.start, button("preview_rows", preview)), parts.below));
  const right = h("div", { class: "side" }, section("yaml_title", h("p", { class: "soft" }, t("yaml_help")), parts.yaml, h("div", { class: "actions" }, button("save_yaml", save), button("open_yaml", () => openFile.click()), openFile, parts.command)), section("plan_title", parts.plan), section("rows_title", h("p", { class: "soft" }, t("rows_help")), parts.rows));
  await suggest(false);
  return h("div", { class: "columns-2" }, left, right);
};
