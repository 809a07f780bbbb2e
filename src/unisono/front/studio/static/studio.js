// The page of `unisono studio`: its views, of which the address says which one is open.
import { LANG, h, session, t } from "./studio-parts.js";
import { buildChat, openChat } from "./studio-chat.js";
import { buildDiagnose, buildResults, openResults } from "./studio-results.js";
import { buildRuns, openRun, refresh } from "./studio-runs.js";
import { buildStart } from "./studio-start.js";

const VIEWS = ["start", "runs", "chat", "results", "diagnose"], POLL_MS = 1200;
const opened = { runs: openRun, chat: openChat, results: openResults };
const views = Object.fromEntries(VIEWS.map((name) => [name, h("div", { id: `v-${name}`, class: "view", hidden: name !== "start" })]));
const banner = h("div", { class: "banner", role: "alert" });
const go = (view, name = "") => { location.hash = name ? `${view}/${encodeURIComponent(name)}` : view; };
const show = () => {
  const [view, name] = location.hash.slice(1).split("/"), open = VIEWS.includes(view) ? view : "start";
  for (const one of VIEWS) views[one].hidden = one !== open;
  for (const link of document.querySelectorAll("nav a")) link.dataset.view === open ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  document.title = `${t(`view_${open}`)} · unisono studio`;
  opened[open]?.(name ? decodeURIComponent(name) : "");
};
const build = () => {
  const other = new URL(location.href);
  other.searchParams.set("lang", LANG === "zh" ? "en" : "zh");
  document.getElementById("page").replaceChildren(h("a", { class: "skip", href: "#main", on: { click: (event) => { event.preventDefault(); document.getElementById("main").focus(); } } }, t("skip")),
    h("header", { class: "top" }, h("div", { class: "bar" }, h("div", { class: "brand" }, h("span", { class: "mark", "aria-hidden": "true" }, h("i"), h("i"), h("i")), h("h1", {}, "unisono studio")),
      h("nav", { "aria-label": t("views") }, h("ul", {}, VIEWS.map((name) => h("li", {}, h("a", { href: `#${name}`, "data-view": name }, t(`view_${name}`)))))),
      h("a", { href: "/board", class: "soft" }, "unisono board"), h("a", { href: other.href, lang: LANG === "zh" ? "en" : "zh-CN", class: "soft" }, t("language")))),
    banner, h("main", { id: "main", tabindex: "-1" }, Object.values(views)));
};
const poll = async () => {
  await refresh();
  banner.textContent = document.documentElement.dataset.connection === "lost" ? t("lost") : "";
  setTimeout(poll, POLL_MS);
};
const begin = async () => {
  build();
  await session();
  views.runs.append(...buildRuns(go));
  views.chat.append(buildChat());
  views.results.append(...buildResults());
  views.diagnose.append(buildDiagnose());
  views.start.append(await buildStart((name) => go("runs", name)));
  addEventListener("hashchange", show);
  show();
  document.documentElement.dataset.built = String(Math.round(performance.now()));
  poll();
};
begin();
