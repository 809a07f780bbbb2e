// What the parts of the studio's page share: words, elements and requests. Text is only ever set as text.
const json = (id) => JSON.parse(document.getElementById(id).textContent);
const WORDS = json("words");
const asked = new URLSearchParams(location.search).get("lang");
export const LANG = ["en", "zh"].includes(asked) ? asked
  : (navigator.languages || [navigator.language || "en"]).map((one) => one.slice(0, 2)).find((one) => one === "en" || one === "zh") || "en";
document.documentElement.lang = LANG === "zh" ? "zh-CN" : "en";
const locale = LANG === "zh" ? "zh-CN" : "en";
export const t = (name, values = {}) => (WORDS[LANG][name] ?? name).replace(/\{(\w+)\}/g, (_, key) => String(values[key] ?? ""));
export const has = (name) => name in WORDS[LANG];
export const inBoth = (name) => Object.values(WORDS).map((words) => words[name] ?? "").join(" ");
export const inLanguage = (text) => text?.[LANG] ?? "";
const numbers = new Intl.NumberFormat(locale, { maximumSignificantDigits: 4 });
const wholes = new Intl.NumberFormat(locale, { maximumFractionDigits: 0 });
export const number = (value) => value === null || value === undefined ? "–" : Number.isInteger(value) ? wholes.format(value) : numbers.format(value);
export const bytes = (n) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (n >= 999.5 && at < 4) { n /= 1000; at += 1; }
  return `${new Intl.NumberFormat(locale, { maximumSignificantDigits: 3 }).format(n)} ${units[at]}`;
};
export const duration = (s) => {
  if (s === null || s === undefined || !isFinite(s)) return "–";
  const unit = LANG === "zh" ? ["秒", "分", "小时"] : ["s", "min", "h"], whole = Math.round(s);
  if (whole < 60) return `${whole} ${unit[0]}`;
  if (whole < 3600) return `${Math.floor(whole / 60)} ${unit[1]} ${whole % 60} ${unit[0]}`;
  return `${Math.floor(whole / 3600)} ${unit[2]} ${Math.floor(whole / 60) % 60} ${unit[1]}`;
};

export const h = (tag, props = {}, ...children) => {
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
// replaces what is inside a node, and keeps the focus on the element with the same data-keep
export const put = (node, ...children) => {
  const keep = node.contains(document.activeElement) ? document.activeElement.dataset.keep : null;
  const open = new Map([...node.querySelectorAll("details[data-keep]")].map((one) => [one.dataset.keep, one.open]));
  node.replaceChildren(...children.flat(3).filter((one) => one !== null && one !== undefined && one !== false));
  for (const one of node.querySelectorAll("details[data-keep]")) if (open.has(one.dataset.keep)) one.open = open.get(one.dataset.keep);
  if (keep) [...node.querySelectorAll("[data-keep]")].find((one) => one.dataset.keep === keep)?.focus({ preventScroll: true });
};
export const button = (name, call, props = {}) => h("button", { type: "button", "data-keep": props["data-keep"] ?? name, on: { click: call }, ...props }, t(name));
export const field = (name, input, ...more) => {
  input.id ||= `i-${name}`;
  return h("div", { class: "field" }, h("label", { for: input.id }, t(name)), input, more);
};
export const section = (name, ...inner) => h("section", { class: "region", id: `s-${name}`, "aria-labelledby": `h-${name}` }, h("div", { class: "head" }, h("h2", { id: `h-${name}` }, t(name))), inner);
export const table = (caption, head, rows) => h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption, "data-keep": `table ${caption}` },
  h("table", {}, h("caption", { class: "sr" }, caption), h("thead", {}, h("tr", {}, head.map((one) => h("th", { scope: "col" }, one)))), h("tbody", {}, rows)));

export const problemNode = (one) => h("div", { class: "note bad", role: "alert" }, h("strong", {}, inLanguage(one.what)),
  ["where", "why", "fix"].map((name) => inLanguage(one[name]) ? h("div", {}, h("span", { class: "part" }, t(`problem_${name}`)), " ", inLanguage(one[name])) : null));
export const problemNodes = (problems) => (problems ?? []).map(problemNode);

// ---- requests: a change has the token in a header, and a server that was started again has another one
let token = null;
export const owner = { may_push: false, launchers: [] }; // what the server's owner has set up
export const session = async () => {
  const answer = await fetch("/api/studio/session", { credentials: "same-origin" });
  if (!answer.ok) throw new Error(String(answer.status));
  const value = await answer.json();
  token = value.token;
  Object.assign(owner, value);
  return value;
};
export const get = async (path) => {
  const answer = await fetch(path, { credentials: "same-origin" });
  const value = await answer.json().catch(() => ({}));
  if (!answer.ok) throw Object.assign(new Error(String(answer.status)), { problems: value.problems ?? [] });
  return value;
};
const send = async (path, type, body, signal, again = true) => {
  if (!token) await session();
  const answer = await fetch(path, { method: "POST", credentials: "same-origin", headers: { "Content-Type": type, Authorization: `Bearer ${token}` }, body, signal });
  if (answer.status === 403 && again) { await session(); return send(path, type, body, signal, false); }
  return answer;
};
export const stream = (path, body, signal) => send(path, "application/json", JSON.stringify(body), signal);
const lost = (status) => ({ problems: [{ what: { en: t("no_answer", { status }), zh: t("no_answer", { status }) } }] });
const valueOf = async (answer) => {
  const value = await answer.json().catch(() => null);
  return value ?? lost(answer.status);
};
// the answer, or {problems}
export const post = async (action, body) => {
  try { return await valueOf(await send(`/api/studio/${action}`, "application/json", JSON.stringify(body))); } catch { return lost("–"); }
};
export const upload = async (file) => {
  try { return await valueOf(await send(`/api/studio/uploads?name=${encodeURIComponent(file.name)}`, "application/octet-stream", file)); } catch { return lost("–"); }
};

// ---- choosing a file of the server
export const chooseFile = (onChoose) => {
  const list = h("div", { class: "files" }), title = h("p", { class: "path" });
  const dialog = h("dialog", { "aria-label": t("browse"), on: { close: () => dialog.remove() } }, h("div", { class: "head" }, h("h2", {}, t("browse")), button("close_dialog", () => dialog.close())), title, list);
  const choose = (path) => { dialog.close(); onChoose(path); };
  const show = async (path) => {
    let value;
    try { value = await get(`/api/studio/files?path=${encodeURIComponent(path)}`); } catch (error) { put(list, problemNodes(error.problems)); return; }
    title.textContent = value.path;
    const row = (name, call, size = "") => h("li", {}, h("button", { type: "button", class: "plain", on: { click: call } }, name), h("span", { class: "soft" }, size));
    put(list, h("ul", {}, value.parent === null ? (value.roots.length > 1 ? value.roots.map((root) => row(`⌂ ${root}`, () => show(root))) : null) : row("↑ ..", () => show(value.parent)),
      value.folders.map((one) => row(`${one.name}/`, () => show(one.path))), value.files.map((one) => row(one.name, () => choose(one.path), bytes(one.bytes)))),
      value.folders.length + value.files.length ? null : h("p", { class: "empty" }, t("no_files")));
    list.querySelector("button")?.focus();
  };
  document.body.append(dialog);
  dialog.showModal();
  show("");
};
