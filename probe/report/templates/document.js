// A click (or Enter) on the header of a column sorts by it: numbers as numbers, and what is no number last.
document.querySelectorAll('th').forEach(head => {
  const sort = () => {
    const table = head.closest('table'), body = table.tBodies[0], place = head.cellIndex
    const up = head.getAttribute('aria-sort') !== 'ascending'
    table.querySelectorAll('th').forEach(other => other.removeAttribute('aria-sort'))
    head.setAttribute('aria-sort', up ? 'ascending' : 'descending')
    const key = row => row.cells[place].dataset.n ?? ''
    const text = row => row.cells[place].textContent
    const order = (a, b) => {
      if (key(a) === '' || key(b) === '') return key(a) !== '' ? -1 : key(b) !== '' ? 1
        : (up ? 1 : -1) * text(a).localeCompare(text(b), undefined, {numeric: true})
      return (up ? 1 : -1) * (Number(key(a)) - Number(key(b)))
    }
    body.append(...[...body.rows].sort(order))
  }
  head.tabIndex = 0
  head.addEventListener('click', sort)
  head.addEventListener('keydown', event => { if (event.key === 'Enter') sort() })
})
// A shadow on the right edge of a table shows that it continues there.
document.querySelectorAll('.box').forEach(box => {
  const mark = () =>
    box.parentElement.classList.toggle('more', box.scrollLeft + box.clientWidth < box.scrollWidth - 1)
  box.addEventListener('scroll', mark)
  addEventListener('resize', mark)
  mark()
})
