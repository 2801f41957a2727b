/* The note beside a token: its score, what came next, and what the model thought likely. By mouse, finger and keys. */
{
  const { data, marks, ofSpan, rankOf, reach, scoreOf, tokenText } = texts;
  const [box, tip] = [byId("documents"), byId("tip")];
  const SIGNS = { " ": "␣", "\n": "↵", "\r": "↵", "\t": "⇥" };
  const visible = (text) => text.replace(/[ \n\r\t]/g, (c) => SIGNS[c]);
  const chance = (p) => (p > 0 && p < 0.0005 ? "<\u00a00.1\u00a0%" : percent(p));
  let focused = null; // the token with the focus, while its note is wanted
  let pointed = null; // the token under the mouse
  let mouse = [];

  const quoted = (text) => element("code", visible(text));
  const line = (className, ...parts) => {
    const made = element("p", undefined, className);
    made.append(...parts);
    return made;
  };

  const likely = (each, i) => {
    const list = element("ol", undefined, "likely");
    const came = i + 1 < each.starts.length ? tokenText(each, i + 1) : null;
    for (let k = i * each.width; k < (i + 1) * each.width && each.codes[k] >= 0; k++) {
      const word = data.words[each.codes[k]];
      const [row, track, bar] = [element("li"), element("span", undefined, "track"), element("i")];
      if (word === came) row.className = "came";
      bar.style.width = `${100 * each.probs[k]}%`;
      track.append(bar);
      row.append(quoted(word), track, element("span", chance(each.probs[k]), "much"));
      list.append(row);
    }
    return list.children.length ? [list] : [];
  };

  const contents = (each, i) => {
    const [score, log] = [scoreOf(each, i), each.logs[i]];
    const scored = score === score;
    let rank = "without a score";
    if (scored) {
      const marked = marks(each, i) ? "; marked" : "";
      rank = `higher than ${percent(rankOf(score))} of all tokens${marked}`;
    }
    const several = `${each.counts[i]} tokens, with the highest of their scores; `;
    const bytes = each.counts[i] > 1 ? several : "";
    const hasNext = i + 1 < each.starts.length;
    const came = hasNext ? quoted(tokenText(each, i + 1)) : "a token that is not in the text";
    let next = ["end of the text"];
    if (log === log) {
      const logText = brief(log).replace("-", "−");
      next = ["followed by ", came, `: ${chance(Math.exp(log))}, log p ${logText}`];
    }
    return [
      line("head", quoted(tokenText(each, i)), ...(scored ? [element("span", `score ${brief(score)}`)] : [])),
      line("rank", bytes + rank),
      line("next", ...next),
      ...likely(each, i),
    ];
  };

  const show = (span) => {
    const each = ofSpan(span);
    tip.replaceChildren(...contents(each, span.token));
    tip.classList.toggle("pinned", span === focused);
    tip.hidden = false;
    const [first, size] = [span.getClientRects()[0], tip.getBoundingClientRect()];
    const room = document.documentElement.clientWidth - size.width - 8;
    const above = first.bottom + size.height + 16 > innerHeight && first.top > size.height + byId("share").getBoundingClientRect().bottom;
    tip.style.left = `${Math.max(8, Math.min(first.left, room)) + scrollX}px`;
    tip.style.top = `${(above ? first.top - size.height - 10 : first.bottom + 10) + scrollY}px`;
  };

  const rest = () => (focused ? show(focused) : (tip.hidden = true));

  const take = (span) => {
    reach(ofSpan(span), span.token);
    span.focus();
  };

  const nextMarked = (each, from, step) => {
    for (let i = from + step; i >= 0 && i < each.starts.length; i += step) if (marks(each, i)) return i;
    return from;
  };

  const MOVES = {
    ArrowLeft: (each, i) => i - 1,
    ArrowRight: (each, i) => i + 1,
    ArrowUp: (each, i) => nextMarked(each, i, -1),
    ArrowDown: (each, i) => nextMarked(each, i, 1),
    Home: () => 0,
    End: (each) => each.starts.length - 1,
  };

  box.addEventListener("pointermove", ({ target, pointerType, clientX, clientY }) => {
    // A tap takes the token; and what scrolls under a mouse that rests is not pointed at.
    const rests = clientX === mouse[0] && clientY === mouse[1];
    mouse = [clientX, clientY];
    const span = target.closest(".t");
    if (pointerType === "touch" || rests || span === pointed) return;
    pointed = span;
    if (span) show(span);
    else rest();
  });
  box.addEventListener("pointerleave", () => {
    pointed = null;
    rest();
  });
  box.addEventListener("click", ({ target }) => {
    const span = target.closest(".t");
    if (span && getSelection().isCollapsed) take(span);
  });
  box.addEventListener("focusin", ({ target }) => {
    const span = target.closest(".t");
    if (!span) return;
    focused = span;
    span.setAttribute("aria-describedby", "tip");
    show(span);
  });
  box.addEventListener("focusout", ({ target }) => {
    if (!target.matches(".t")) return;
    target.removeAttribute("aria-describedby");
    focused = null;
    tip.hidden = true;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      focused = null;
      tip.hidden = true;
      return;
    }
    const span = event.target.closest?.(".t");
    if (!span || !(event.key in MOVES) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const each = ofSpan(span);
    const i = Math.min(each.starts.length - 1, Math.max(0, MOVES[event.key](each, span.token)));
    if (i !== span.token) take(each.spans[i]);
    else {
      focused = span;
      show(span);
    }
  });
  addEventListener("resize", rest);
  document.addEventListener("pointerdown", ({ clientX, clientY }) => (mouse = [clientX, clientY]));
  for (const id of ["method", "share"]) byId(id).addEventListener("input", () => (tip.hidden = true));
}
