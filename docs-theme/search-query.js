/* Put before the theme's search worker. A pasted log line is not a query of a few words: the theme would search for every word's prefix ("to" finds "token"), and
   stumble over its signs. Here it becomes its whole words, without times, addresses, paths and numbers that differ from run to run. */
;(() => {
  const listen = self.addEventListener
  const VARYING = [
    /\x1b?\[\d{1,3}m/g,
    /\d{4}-\d\d-\d\d[T ]?|\b\d{1,2}:\d\d:\d\d(?:[.,]\d+)?|\b[A-Z][a-z]{2} {1,2}\d{1,2}\b/g,
    /\b(?!127\.)(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?(?:<\d+>)?/g,
    /https?:\/\/\S+/g,
    /\[(?:default\d*:)?rank ?\d+\]:?|\[PG[^\]]*\]|\[[WEFI]\d{3,4}\b|\bprocess_?\d+/gi,
    /(?:\/|\.\.\/|\b)(?:[\w.-]+\/){2,}/g,
    /\b0x[0-9a-f]+\b|\b[0-9a-f]{8,}\b/gi,
    /\b\w*\d{5,}\w*\b/g,
  ]
  const words = (line) => {
    const plain = VARYING.reduce((text, pattern) => text.replace(pattern, " "), line)
    const parts = plain.split(/[\s\-,;:!=[\]()"'`/|<>{}+*^~&%$#@?\\]+|\.(?!\d)/)
    return [...new Set(parts)].filter((word) => word.length > 1 && !/^(?!127\.)[\d.]+[smkMG]?[Bs]?$/.test(word))
  }
  const isLine = (query) => query.trim().split(/\s+/).length > 2 || /[:=[\](){}<>/\\^~*+#]|\w'\w/.test(query)
  const prepared = (query) => (isLine(query) && words(query).length ? words(query).map((word) => `${word}^1`).join(" ") : query)
  self.addEventListener = (type, handler) =>
    listen.call(self, type, (event) => {
      const { type: kind, data } = event.data || {}
      handler(kind === 2 && !/\p{sc=Han}/u.test(data) ? { data: { type: kind, data: prepared(data) } } : event)
    })
})()
