/* The theme searches after keys alone. Text that the mouse pastes or drops comes without a key: it is announced as if one had been released. */
document.addEventListener("input", ({ target }) => {
  if (target.matches('[data-md-component="search-query"]')) target.dispatchEvent(new Event("keyup"))
})
/* Wide tables scroll on a phone: also with the arrow keys. */
addEventListener("load", () => {
  for (const wrap of document.querySelectorAll(".md-typeset__scrollwrap")) wrap.tabIndex = 0
})
